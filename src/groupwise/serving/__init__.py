"""A model behind an address: chat completions as OpenAI's clients ask for them."""

from groupwise.serving.server import KEY, Server, find_key, open_server
from groupwise.serving.service import Service, open_service

__all__ = ["KEY", "Server", "Service", "find_key", "open_server", "open_service"]
