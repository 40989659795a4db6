"""A conversation with a simulated user, who wants something and says so bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.records.errors import ConfigurationError
from headway.rollout.environment import Answer, Environment, Episode

DEFAULT_PROMPT = """\
You play a person who talks to an assistant. Stay in that role, and never help the assistant with its part.

What you want and know:
{goal}

Your first message was: {opening}

Say one thing at a time, in your own words, and only what the assistant has asked for or needs next. {endings}"""
_ROLE = "user"  # its own conversation, where the policy plays it


class Dialogue(Environment):
    """The policy answers a user that is a fixed model, or the policy itself in a role that isn't learned.

    A task's prompt is the user's first message; what the user wants stands in the task's field ``goal``, which the
    policy never sees. The conversation ends when the user says one of ``ends``, and nothing else on that last line.
    """

    def __init__(
        self,
        user: str = "",
        system: str = "",
        prompt: str = DEFAULT_PROMPT,
        ends: Mapping[str, float] | Sequence[str] = ("[DONE]",),
        goal: str = "goal",
    ) -> None:
        """``user``: NAME of ``[environment.models.NAME]``; "": the policy plays it. ``system``: the policy's first
        message. ``prompt``: the user's; may say {goal}, {opening} and {endings}. ``ends``: what the user says at the
        end, with the reward it gives; a list: ``[verifier]`` judges the last answer. ``goal``: the task's field."""
        if not ends or "{goal}" not in prompt:
            raise ConfigurationError("environment.parameters: ends must not be empty, and prompt must say {goal}")
        self.system = system
        self.models = (user,) if user else ()
        self._user = user
        self._prompt = prompt
        self._rewards = dict(ends) if isinstance(ends, Mapping) else None
        self._ends = tuple(ends)
        self._goal = goal

    async def begin(self, episode: Episode) -> None:
        if self._goal not in episode.task.metadata:
            raise ValueError(f"task {episode.task.task_id} has no field {self._goal!r}: what its user wants")
        await super().begin(episode)
        if self._user:
            episode.state["talk"] = [{"role": "system", "content": self._script(episode)}]  # as the user has it
        else:
            episode.say(self._script(episode), "system", to=_ROLE)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if self._rewards is not None:
            episode.reward(0.0)
        if answer.speaker == _ROLE:
            self._heard(episode, answer.text)
        elif await self.call_tools(episode, answer):
            return
        elif self._user:
            talk = episode.state["talk"]
            talk.append({"role": "user", "content": answer.text})
            said = await episode.ask(self._user, talk)
            talk.append({"role": "assistant", "content": said})
            self._heard(episode, said)
        else:
            episode.say(answer.text, to=_ROLE)
            episode.turn_to(_ROLE, learned=False, tools=())

    def _heard(self, episode: Episode, said: str) -> None:
        """The user's words: the policy is told them, or the conversation is over."""
        last = said.strip().rpartition("\n")[2].strip()
        for end in self._ends:
            if end.strip() in (said.strip(), last):  # alone: who speaks of it hasn't ended
                if self._rewards is not None:
                    episode.reward(self._rewards[end])
                episode.end(end)
                return
        episode.turn_to("", tools=list(self.offered.values()))
        episode.say(said)

    def _script(self, episode: Episode) -> str:
        words = " or ".join(self._ends)
        endings = f"When the conversation is over for you, say {words} and nothing else."
        filled = self._prompt.replace("{opening}", episode.task.prompt).replace("{endings}", endings)
        return filled.replace("{goal}", str(episode.task.metadata[self._goal]))
