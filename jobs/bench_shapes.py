"""Generated records of a stated shape, and what reading a record costs at least.

The shape is exact in the scorer's own tokens: C context tokens (separators included) in K passages of equal
length, A answer tokens. Every passage holds the same number of sentences, so that a package that cuts its
context by sentences (`gasp-rag`) comes to the same K pieces.
"""

import random
from dataclasses import dataclass
from typing import Any

from detector.prompts import Reading, encode
from detector.record import Record
from jobs.errors import ConfigError

_SENTENCE_TOKENS = 24
_TRIES = 20

# Different first letters, none of them that of "Question": no two neighbouring passages begin with the same
# token, so that the conditions share exactly what the formula says and not a word more.
_OPENINGS = "Both Each Few He In Many No One Some The When You".split()
_NOUNS = "bridge harbour river market council museum engine garden tower school valley library".split()
_WORDS = """
a about after along also an and another are as at before between built by carried changed council down early
every first for found from garden gave had harbour has held her his in into is it its kept large late left
little long made market may more near new not of off often old on once one open other over painted place
quiet river road said second she should small some still stone that the their then there they through time to
tower two under until was water were where which while winter with work would year
""".split()
WORDS = tuple(dict.fromkeys([*_WORDS, *_OPENINGS, *_NOUNS, "Context", "Question", "Answer", "What", "said"]))
"""Everything that generated records and their prompts are made of, but for punctuation."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One answer: C context tokens in K passages, A answer tokens."""

    context_tokens: int
    answer_tokens: int
    passages: int

    def __str__(self) -> str:
        return f"C = {self.context_tokens:,}, A = {self.answer_tokens:,}, K = {self.passages:,}"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the cost of a token depends on: body parameters without embeddings, L·H·d, D and V."""

    body_parameters: int
    attention_width: int
    width: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        """Read it off a causal language model of transformers."""
        config, embeddings = model.config.get_text_config(), model.get_input_embeddings().weight
        n_heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // n_heads
        body = sum(part.numel() for part in model.base_model.parameters()) - embeddings.numel()
        vocabulary, width = model.get_output_embeddings().weight.shape
        return cls(body, config.num_hidden_layers * n_heads * head_width, width, vocabulary)


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens through the body, query-key pairs of one head and layer, and rows through the output head."""

    tokens: int = 0
    pairs: int = 0
    rows: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.tokens + other.tokens, self.pairs + other.pairs, self.rows + other.rows)

    def flops(self, size: ModelSize) -> int:
        """Floating point operations of the matrix products: 2N per token, 4·L·H·d per pair, 2·D·V per row."""
        return (
            2 * size.body_parameters * self.tokens
            + 4 * size.attention_width * self.pairs
            + 2 * size.width * size.vocabulary * self.rows
        )


def floor(reading: Reading, loo: str) -> Cost:
    """The least that a leave-one-out mode (`exact`, `masked`, `off`) computes when nothing is read twice.

    With P + S prompt tokens around C context tokens, and A - 1 answer tokens since the last one predicts
    nothing: P + C + S + A - 1 with all passages, S + A - 1 with none, and for each of K passages S + A - 1
    (masked) or that and all that follows the passage (exact). Summed over windows and segments.
    """
    total = Cost()
    for window in reading.windows:
        before, stop = window.layout.passages
        pieces = [len(window.full) - len(prompt) for prompt in window.without]
        for segment in reading.segments:
            own = len(window.full) - stop + segment.stop - segment.tail - 1
            none = len(window.none) + segment.stop - segment.tail - 1
            shared = before if window.none[:before] == window.full[:before] else 0
            runs = [(0, stop + own), (shared, none - shared)]  # tokens on the cache, tokens computed
            if loo == "masked":
                runs += [(stop - piece, own) for piece in pieces]
            elif loo == "exact":
                runs += [
                    (before + sum(pieces[:k]), sum(pieces[k + 1 :]) + own)
                    for k in range(len(pieces))
                    if window.without[k] != window.none  # of one passage nothing is left without it
                ]
            n_conditions = 2 + (len(pieces) if loo != "off" else 0)
            total += Cost(
                tokens=sum(new for _, new in runs),
                pairs=sum(new * cached + new * (new + 1) // 2 for cached, new in runs),
                rows=n_conditions * (segment.stop - segment.start),
            )
    return total


def generate(shape: Shape, n_records: int, tokenizer: Any, separator: str, seed: int = 0) -> list[Record]:
    """`n_records` different records of `shape`; the same ones for the same seed and tokenizer.

    `separator` is what the prompt profile writes after a passage; its tokens count as context. Raises
    ConfigError where the tokens are too few for a sentence.
    """
    if min(shape.context_tokens, shape.answer_tokens, shape.passages, n_records) < 1:
        raise ConfigError(f"{shape}: context, answer and passages need at least one token, and one answer")
    writer = _Writer(tokenizer)
    share, left = divmod(shape.context_tokens, shape.passages)
    records = []
    for index in range(n_records):
        chooser = random.Random(f"{seed} {index}")
        first = chooser.randrange(len(_OPENINGS))
        passages = [
            writer.write(share + (k < left), _at_least_one(share), first + k, separator, chooser)
            for k in range(shape.passages)
        ]
        answer = writer.write(shape.answer_tokens, _at_least_one(shape.answer_tokens), first, "", chooser)
        question = f"What is said about the {chooser.choice(_NOUNS)} and the {chooser.choice(_NOUNS)}?"
        records.append(Record(question, passages, answer, response_id=f"{seed}-{index}", language="en"))
    return records


def _at_least_one(n_tokens: int) -> int:
    return max(1, n_tokens // _SENTENCE_TOKENS)


class _Writer:
    """Writes text of an exact number of tokens from words whose costs are looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._costs = {word: self._count(f" {word}") for word in [*_WORDS, *_OPENINGS]}
        self._affordable: dict[int, list[str]] = {}

    def write(
        self, n_tokens: int, n_sentences: int, opening: int, ending: str, chooser: random.Random
    ) -> str:
        """Sentences that come to `n_tokens` together with `ending`."""
        state, aim = chooser.getstate(), n_tokens
        # Costs add up but for a constant (".\n\n" may be one token): a draft that misses is aimed again.
        for _ in range(_TRIES):
            chooser.setstate(state)
            text = self._draft(aim, n_sentences, opening, chooser)
            missing = n_tokens - self._count(text + ending)
            if not missing:
                return text
            aim += missing
        raise ConfigError(
            f"a text of {n_tokens} tokens in {n_sentences} sentences cannot be made with this tokenizer; "
            "use more --context-tokens, more --answer-tokens or fewer --passages"
        )

    def _draft(self, n_tokens: int, n_sentences: int, opening: int, chooser: random.Random) -> str:
        sentences = []
        for index in range(n_sentences):
            left = n_tokens * (index + 1) // n_sentences - n_tokens * index // n_sentences
            words = [_OPENINGS[opening % len(_OPENINGS)] if index == 0 else chooser.choice(_OPENINGS)]
            left -= self._costs[words[0]] + 1  # the full stop
            while choices := self._within(left):
                words.append(chooser.choice(choices))
                left -= self._costs[words[-1]]
            sentences.append(" ".join(words) + ".")
        return " ".join(sentences)

    def _within(self, left: int) -> list[str]:
        if left not in self._affordable:
            self._affordable[left] = [word for word in _WORDS if 0 < self._costs[word] <= left]
        return self._affordable[left]

    def _count(self, text: str) -> int:
        return len(encode(self._tokenizer, text)[0])
