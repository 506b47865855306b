"""What a run trains on and is judged on: texts, cut into windows of tokens once and read from files ever after."""
