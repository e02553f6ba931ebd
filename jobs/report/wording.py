"""The sentences that the page says in its own voice: what a reason, a flag and a number mean."""

from detector.methods import METHODS
from jobs.findings import GROUPS
from jobs.report.page import Basis, Share

PHRASES = {
    "ensemble": ("is judged to rest on nothing", "are judged to rest on nothing"),
    "blend": ("leans least on its passages", "lean least on their passages"),
    "gasp": ("reacts least to its passages", "react least to their passages"),
    "gap": ("gains least from its passages", "gain least from their passages"),
    "jsd_none": ("reacts least to its passages", "react least to their passages"),
    "perplexity": ("surprises the scorer most", "surprise the scorer most"),
    "length": ("is the longest", "are the longest"),
}
"""What being flagged by each deciding method says of one sentence, and of several."""

REASONS = {
    "malformed_row": "the row cannot be read: cut off, not valid in its format, or of the wrong types",
    "missing_answer": "no answer was logged",
    "missing_question": "no question was logged",
    "no_passages": "no passage was retrieved, so nothing exists that the answer could rest on",
    "passage_text_missing": "passages were logged by id only, without their text",
    "answer_too_short": "the answer has fewer tokens than the set minimum",
    "duplicate": "the same response id came earlier in this run and counts once",
    "over_window": "the record does not fit the scorer's window and windows are off",
    "scoring_failed": "the scorer failed on this record; the detail says how",
}
"""Each reject reason in plain words."""

FEATURES = {
    "gap": "how much likelier all passages together make its words",
    "jsd_none": "how far the predictions move when all passages go",
    "max_drop": "how much likelihood its words lose without the one passage they need most",
    "max_jsd": "how far the predictions move without that one passage",
    "surprisal": "how unlikely its words are with all passages",
    "entropy": "how undecided the scorer is while it reads",
    "absent_pairs": "what share of it stands in no passage even two words in a row",
    "attention_share": "how much the scorer looks at the passages and not back at the answer",
    "n_tokens": "how many tokens it has",
    "log_tokens": "how long it is (logarithm of its tokens)",
}
"""Each measured feature as something that is read off a sentence."""

_ORDINALS = ("first", "second", "third", "fourth")

LIMITS = (
    "The scorer is a small language model: it reads plain prose best, and tables, long inferences and rare "
    "languages less well.",
    "A sentence that agrees with common knowledge is likely with or without passages. It can be flagged "
    "although it is true, and an invented sentence that sounds like a passage can pass.",
    "A wrong number, name or date inside a sentence that otherwise follows its passage is often missed: one "
    "token among twenty moves the mean little.",
    "The passages are taken as they were logged. A sentence that rests faithfully on a wrong passage is not "
    "flagged, and a passage that was shortened before it was logged makes its sentence look unsupported.",
    "Evidence is the passage whose loss costs most. Where two passages say the same, losing one costs "
    "little, so neither may be named.",
)
"""What the page must not be trusted with."""

DIRECTIONS = frozenset({"ar", "arc", "ckb", "dv", "fa", "he", "iw", "ks", "ps", "sd", "ug", "ur", "yi"})
"""Language subtags that are written from right to left."""


def direction(language: str | None) -> str:
    """The HTML `dir` of log text: known from the language, else left to the text's first strong letter."""
    if not language:
        return "auto"
    return "rtl" if language.lower().replace("_", "-").split("-")[0] in DIRECTIONS else "ltr"


def headline(method: str, sentences: Share, answers: Share) -> str:
    """The verdict in one line."""
    if answers.total == 0:
        return "No answer could be audited"
    of_sentences = f"of {sentences.total:,} sentence{'s' * (sentences.total != 1)}"
    of_answers = f"{answers.total:,} answer{'s' * (answers.total != 1)}"
    if sentences.count == 0:
        return f"None {of_sentences} in {of_answers} reaches the threshold"
    one, several = PHRASES[method]
    reacts = one if sentences.count == 1 else several
    return f"{sentences.count:,} {of_sentences} in {answers.count:,} of {of_answers} {reacts}"


def explain_basis(basis: Basis, method: str) -> tuple[str, ...]:
    """What a flag means on this page, one paragraph each."""
    return (f"The method that judged is {method}.", *_explain_threshold(basis))


def _explain_threshold(basis: Basis) -> tuple[str, ...]:
    share = "a share" if basis.flag_budget is None else f"at most {percent(basis.flag_budget)}"
    never = "Flagged means “worth reading first”, not “proven false”; not flagged does not mean proven true."
    if basis.target_fpr is not None:
        return (
            f"The threshold is an operating point: of the data that the method was trained on ({basis.data}) "
            f"it flags {percent(basis.target_fpr)} of the sentences that people found supported, each scored "
            "by a head that had not seen it. That false-alarm rate was not measured on this traffic: how "
            "often a flag is wrong here is not known until somebody labels some of it.",
            never,
        )
    if basis.given:
        return (
            f"The threshold comes from a given profile. There it marks {share} of the sentences of run "
            f"{basis.threshold_from}, those that score highest; here the share can be higher or lower, and "
            "can be compared with other runs under this profile. It is not an error rate: no labels stand "
            "behind it.",
            never,
        )
    return (
        f"The threshold is a display budget: it shows {share} of this run’s sentences, those that score "
        "highest. It is not an error rate, because no calibrated profile was given: a night without a "
        "single mistake would have as many flags.",
        never,
    )


def explain_decision(method: str, loo: str, floor_nats: float) -> tuple[str, ...]:
    """How a sentence gets its score, in five lines. `loo`: exact, masked or off."""
    decider = METHODS[method]
    passes = "once with all passages, once with none"
    if loo != "off":
        passes += " and once " + (
            "with each passage in turn hidden from the answer"
            if loo == "masked"
            else "without each passage in turn"
        )
    read = "; ".join(FEATURES[name] for name in decider.features if not decider.trained)
    added = " and they are added up" if len(decider.features) > 1 else ""
    how = (
        f"Of every sentence it measures, as means over its tokens: {read}.",
        f"Each number is standardised with the reference statistics below{added}. "
        f"{_directions(tuple(decider.features.values()))}, the higher the score: less grounded.",
    )
    if decider.trained:
        groups = "; ".join(f"{meaning} ({group})" for group, meaning in GROUPS.items())
        how = (
            f"With and without the passages, it keeps of every word: {groups}.",
            "A head that was fitted to people’s labels makes of these the probability that a sentence rests "
            "on nothing. It is the score, as it is; “mostly by” names what added most to the log-odds.",
        )
    return (
        f"Nothing is generated and no judge is asked: a small model re-reads each logged answer, {passes}.",
        *how,
        "A sentence at or above the threshold is flagged. An answer is flagged with any of its sentences.",
        f"Its evidence is the passage whose {'hiding' if loo == 'masked' else 'removal'} costs it most, "
        f"if at least {floor_nats:g} nats per token."
        if loo != "off"
        else "Evidence needs the reading without each passage, which this run left out (loo: off).",
    )


def _directions(signs: tuple[int, ...]) -> str:
    """Which way each number must go for a higher score: "The smaller", "The larger the first and ..."."""
    words = {-1: "smaller", +1: "larger"}
    if len(set(signs)) == 1:
        return f"The {words[signs[0]]}"
    parts = []
    for sign in dict.fromkeys(signs):
        which = [f"the {place}" for place, other in zip(_ORDINALS, signs, strict=False) if other == sign]
        parts.append(f"the {words[sign]} {' and '.join(which)}")
    return " and ".join(parts).capitalize()


def percent(share: float) -> str:
    """A share in percent to three digits, its sign held to its number by a no-break space.

    >>> percent(0.375)
    '37.5\xa0%'
    """
    number = "under 0.001" if 0 < share < 1e-5 else f"{100 * share:.3g}"
    return f"{number}\N{NO-BREAK SPACE}%"
