"""The colours of a report, for light and dark, by names that its charts and its page share."""

from __future__ import annotations

# Name: light, dark. The light ones are drawn with, so each must be unlike all others.
COLOURS = {
    "page": ("#f4f6f9", "#0d1117"),
    "surface": ("#ffffff", "#161b22"),
    "ink": ("#1a2230", "#e9eef5"),
    "muted": ("#566176", "#9da9ba"),
    "faint": ("#8d97a8", "#6f7b8d"),
    "grid": ("#e4e8ee", "#2a323d"),
    "line": ("#d5dbe4", "#333d4a"),
    "accent": ("#3454d1", "#8aa4ff"),
    "accent-soft": ("#e9edfb", "#1d2744"),
    "gqa": ("#2f6fdb", "#6ea6ff"),
    "mqa": ("#a85408", "#f0a44b"),
    "mla": ("#0a776b", "#3fcfba"),
    "mha": ("#8b3fc4", "#c792ff"),
    "good": ("#0f7a3d", "#5fd38a"),
    "good-soft": ("#e1f5e8", "#12331f"),
    "near": ("#17708a", "#66c6e3"),
    "near-soft": ("#dff3f8", "#10303a"),
    "fair": ("#8a5b00", "#e6b450"),
    "fair-soft": ("#fbf0d6", "#3a2c0c"),
    "poor": ("#b0440c", "#ff9d66"),
    "poor-soft": ("#fde8dc", "#40210f"),
    "bad": ("#b3261e", "#ff8f88"),
    "bad-soft": ("#fce4e2", "#421715"),
    "none": ("#4f5a6e", "#a6b1c2"),
    "none-soft": ("#ebeef3", "#262e39"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
DARK = {name: dark for name, (_, dark) in COLOURS.items()}


def properties(colours: dict[str, str]) -> str:
    """CSS custom properties."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())
