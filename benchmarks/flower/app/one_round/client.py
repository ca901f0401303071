"""A client that does not train: it returns what it was given."""

from __future__ import annotations

from typing import Any

from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod

EXAMPLES = 1000


class Echo(NumPyClient):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        del config
        return parameters, EXAMPLES, {}


def client_fn(context: Any) -> Any:
    del context
    return Echo().to_client()


app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
