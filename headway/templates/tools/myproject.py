"""The environment: a tool that the model may call, and nothing else. The experiment names it as ``myproject:Shop``."""

from __future__ import annotations

from headway.api import Environment, Episode, ToolError


class Shop(Environment):
    """Answers without a call end the rollout; the experiment's verifier judges the last one."""

    def tools(self):
        return (self.price,)

    def price(self, item: str, episode: Episode) -> str:
        """The price of an item.

        item: its name
        """
        prices = episode.task.metadata["prices"]
        if item not in prices:
            raise ToolError(f"there is no {item}")  # the model reads it; the rollout continues
        return str(prices[item])
