"""Text to token ids and back: tokenizers, chat templates, incremental rendering, and grammars of responses.

The package owns the conversion of conversations and tool calls to tokens and the parsing of sampled tokens. It may
import records, config, runtime and telemetry, and never torch or transformers. Begin reading with ``tokenizer.py``,
then ``chat_template.py`` and ``continuation.py``.
"""
