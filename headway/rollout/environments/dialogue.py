"""An environment with a simulated user, who reveals a goal bit by bit."""

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
_ROLE = "user"  # speaker of the user's own conversation, where the policy plays the user


class Dialogue(Environment):
    """Environment in which the policy answers a user: an external model, or the policy in a role without loss.

    A task's prompt is the user's first message; the user's goal is in the task's field ``goal``, which the policy never
    sees. The conversation ends when the last line of the user's message is one of ``ends`` and nothing else.
    """

    def __init__(
        self,
        user: str = "",
        system: str = "",
        prompt: str = DEFAULT_PROMPT,
        ends: Mapping[str, float] | Sequence[str] = ("[DONE]",),
        goal: str = "goal",
    ) -> None:
        """``user``: NAME of ``[environment.models.NAME]``; "": the policy plays the user. ``system``: the policy's
        system message. ``prompt``: the user's; may contain {goal}, {opening} and {endings}. ``ends``: texts that end
        the conversation, with their rewards; a list: ``[verifier]`` judges the last answer. ``goal``: the task's field.
        """
        if not ends or "{goal}" not in prompt:
            raise ConfigurationError("environment.parameters: ends must not be empty, and prompt must contain {goal}")
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
            episode.state["talk"] = [{"role": "system", "content": self._script(episode)}]  # as the user sees it
        else:
            episode.add_message(self._script(episode), "system", to=_ROLE)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if self._rewards is not None:
            episode.reward(0.0)
        if answer.speaker == _ROLE:
            self._receive_user(episode, answer.text)
        elif await self.call_tools(episode, answer):
            return
        elif self._user:
            conversation = episode.state["talk"]
            conversation.append({"role": "user", "content": answer.text})
            utterance = await episode.ask(self._user, conversation)
            conversation.append({"role": "assistant", "content": utterance})
            self._receive_user(episode, utterance)
        else:
            episode.add_message(answer.text, to=_ROLE)
            episode.set_active_agent(_ROLE, learned=False, tools=())

    def _receive_user(self, episode: Episode, utterance: str) -> None:
        """Pass the user's message on to the policy, or end the conversation with it."""
        last_line = utterance.strip().rpartition("\n")[2].strip()
        for end_text in self._ends:
            if end_text.strip() in (utterance.strip(), last_line):  # alone on its line: a mention of it ends nothing
                if self._rewards is not None:
                    episode.reward(self._rewards[end_text])
                episode.end(end_text)
                return
        episode.set_active_agent("", tools=list(self.offered.values()))
        episode.add_message(utterance)

    def _script(self, episode: Episode) -> str:
        end_words = " or ".join(self._ends)
        endings = f"When the conversation is over for you, say {end_words} and nothing else."
        script = self._prompt.replace("{opening}", episode.task.prompt).replace("{endings}", endings)
        return script.replace("{goal}", str(episode.task.metadata[self._goal]))
