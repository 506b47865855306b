"""A small Hugging Face Hub on this machine, for the real client: see `server`."""

from .client import environment, use
from .faults import Fault
from .server import Hub, hub_server
from .store import Repo

__all__ = ["Fault", "Hub", "Repo", "environment", "hub_server", "use"]
