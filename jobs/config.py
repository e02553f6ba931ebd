"""One frozen tree of settings: defaults here, YAML over them, `--set` and flags over both."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jobs.errors import ConfigError

_PINNED = re.compile(r"#([0-9a-f]{12})$")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _words(cls, tree: Any) -> Any:
        """YAML takes a bare `off` or `on` for a boolean: it is a word again where words are asked for."""
        if not isinstance(tree, dict):
            return tree
        words = {True: "on", False: "off"}
        choices = {name: get_args(field.annotation) for name, field in cls.model_fields.items()}
        return {
            key: words[value] if isinstance(value, bool) and words[value] in choices.get(key, ()) else value
            for key, value in tree.items()
        }


class ScorerConfig(_Section):
    """The model that re-reads the answers."""

    name: str = "smollm2-135m"  # a known name, hub id, local folder or GGUF file
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    window_tokens: int | None = Field(default=None, ge=64)  # None: what the model was trained for
    cache_dir: str | None = None  # where fetched weights live; None: ~/.cache/leadline


class ReadConfig(_Section):
    """How log files become records."""

    # Of the files (rows of one answer each), or whose spans they hold (jobs/formats/systems.py).
    format: Literal[
        "auto",
        "jsonl",
        "json",
        "csv",
        "parquet",
        "openinference",
        "langfuse",
        "langsmith",
        "mlflow",
        "trulens",
        "genai",
    ] = "auto"
    unit_bytes: int = Field(default=1 << 20, ge=1024)  # slice of a JSONL file that one work unit covers
    unit_rows: int = Field(default=512, ge=1)  # rows of a Parquet row group that one work unit covers
    max_record_bytes: int = Field(default=16 << 20, ge=1024)  # a longer line or row is a reject
    max_file_bytes: int = Field(default=256 << 20, ge=1024)  # JSON documents are read whole, up to this
    min_answer_tokens: int = Field(default=1, ge=1)
    allow_missing_question: bool = False
    limit: int | None = Field(default=None, ge=1)  # read at most this many rows, in listing order


AUTO = ("auto",)
FLAG_BUDGET = 0.10
"""The share of sentences to show where nothing else sets a threshold."""


class JudgeConfig(_Section):
    """Every opinion about what is shown. Changing it costs no forward pass."""

    deciding_method: str = "auto"  # the best of `methods`: the bundle's where one is used
    # Which sentences are flagged, without a profile: a share of the run's, or those over a bundle's operating
    # point with this false-alarm rate on its training data. Neither: 0.05 with a bundle, a tenth without.
    flag_budget: float | None = Field(default=None, gt=0, lt=1)
    target_fpr: float | None = Field(default=None, gt=0, lt=1)
    evidence_floor_nats: float = 0.05  # below this mean drop per token no passage is called evidence


class WorkersConfig(_Section):
    """Who does the measuring."""

    device: Literal["auto", "gpu", "cpu"] = "auto"
    count: int | None = Field(default=None, ge=1)  # None: one per GPU, else one per CPU core
    cpus_per_worker: int = Field(default=1, ge=1)  # also the torch threads: numbers depend on them
    max_attempts: int = Field(default=3, ge=1)  # tries per unit before it counts as failed
    # A worker that finishes no row for so long hangs and is replaced; a row that does it twice is a reject.
    stall_seconds: float = Field(default=7200.0, gt=0)
    address: str | None = None  # Ray cluster to join; None: a local one


class ReportConfig(_Section):
    """The page."""

    cards: int = Field(default=100, ge=0, le=500)  # worst answers shown
    title: str = "Leadline audit"


class Config(_Section):
    """Everything a run depends on, beside its logs."""

    scorer: ScorerConfig = ScorerConfig()
    # How a record becomes a prompt.
    profile: Literal["plain", "chat", "refind", "gasp-v1", "gasp-v2"] = "plain"
    # Each piece removed, hidden from the answer, or neither; auto: hidden where that can be done.
    loo: Literal["auto", "exact", "masked", "off"] = "auto"
    # Passages that get less of the attention on passages than this, in every sentence of an answer, are
    # neither removed nor hidden: their passes are saved, their effect stays unknown.
    least_share: float = Field(default=0.0, ge=0, lt=0.5)
    # The trained head that judges: auto is the one that ships for this scorer and profile, if there is one;
    # none; or a folder or URL. PLACE#DIGEST pins its content, and is what a run remembers.
    bundle: str = "auto"
    methods: tuple[str, ...] = Field(default=AUTO, min_length=1)  # auto: all that this run can be judged by
    fields: dict[str, str] = {}  # our name -> dotted path in your rows, before the built-in aliases
    read: ReadConfig = ReadConfig()
    judge: JudgeConfig = JudgeConfig()
    workers: WorkersConfig = WorkersConfig()
    report: ReportConfig = ReportConfig()
    storage: dict[str, Any] = {}  # options for fsspec, e.g. {"endpoint_url": "http://..."} for S3
    store_text: Literal["full", "flagged", "none"] = "full"  # flagged: of answers with a flagged sentence
    # package.module:function, str -> str of the same length: what it leaves of a text is stored, and no more.
    redact: str | None = None
    fail_over: float | None = Field(default=None, ge=0, le=1)
    log_format: Literal["text", "json"] = "text"  # of the lines that driver and workers log

    def measured_by(self) -> dict[str, Any]:
        """The part that measurements depend on: what a resumed run must share with the run it resumes."""
        # Where a machine keeps its weights is its own affair; the scorer's fingerprint says what they are.
        tree = self.model_dump(mode="json", exclude={"scorer": {"cache_dir"}})
        measured_by = {key: tree[key] for key in ("scorer", "profile", "loo", "fields", "read", "store_text")}
        place, digest = self.bundle_place, self.bundle_digest
        used = {"bundle": digest or place} if digest or place not in ("auto", "none") else {}
        used |= {"least_share": self.least_share} if self.least_share else {}
        used |= {"redact": self.redact} if self.redact else {}
        return measured_by | used | {"cpus_per_worker": self.workers.cpus_per_worker}

    @property
    def bundle_place(self) -> str:
        """`auto`, `none`, or the folder or URL of the bundle."""
        return _PINNED.sub("", self.bundle)

    @property
    def bundle_digest(self) -> str | None:
        """The digest that `bundle` pins, where it pins one."""
        found = _PINNED.search(self.bundle)
        return found and found[1]

    def resolved(self, digest: str | None, *, reads_attention: bool, exact: bool = False) -> "Config":
        """The same with everything that is `auto` filled in.

        `digest`: of the bundle that is used, or None. `reads_attention`: whether the run measures the
        scorer's attention, as its family says (`detector.identity`). `exact`: whether the bundle reads passes
        with pieces removed. Raises ConfigError for methods that read what this run does not measure, or that
        decide without being among `methods`.
        """
        from detector.methods import METHODS, usable  # local: keeps `leadline --help` free of numpy

        methods, deciding, loo = self.methods, self.judge.deciding_method, self.loo
        if loo == "auto":  # the profiles of GASP's author are there to give his numbers
            masked = reads_attention and not exact and not self.profile.startswith("gasp-")
            loo = "masked" if masked else "exact"
        if methods == AUTO:
            methods = usable(
                trained=digest is not None, leave_one_out=self.loo != "off", attention=reads_attention
            )
        if deciding == "auto":
            deciding = next(name for name in METHODS if name in methods)  # they stand best first
        found = self.model_copy(
            update={
                "bundle": f"{self.bundle_place}#{digest}" if digest else "none",
                "methods": methods,
                "loo": loo,
                "judge": self.judge.model_copy(update={"deciding_method": deciding}),
            }
        )
        _check_methods(found, reads_attention)
        return found


def fingerprint(tree: Any) -> str:
    """First 12 hex digits of the SHA-256 of a JSON tree, independent of key order."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def load_config(path: str | None, overrides: list[str], flags: dict[str, Any]) -> Config:
    """Read YAML at `path`, then `--set a.b=value` pairs, then flags (dotted keys; None = not given).

    Raises ConfigError with the key at fault. Nothing else is read or opened.
    """
    return make_config(read_settings(path, overrides, flags))


def read_settings(path: str | None, overrides: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """What was set, and only that: the tree of YAML, `--set` pairs and flags, not yet checked."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"config {path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"config {path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = f" at line {where.line + 1}" if where else ""
            raise ConfigError(f"config {path}: not valid YAML{line}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"config {path}: the top level must be keys and values")
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write it as --set key.path=value")
        try:
            _put(tree, key, yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"--set {pair}: the value is not valid YAML") from None
    for key, value in flags.items():
        if value is not None:
            _put(tree, key, value)
    return tree


def make_config(tree: dict[str, Any]) -> Config:
    """Check a tree of settings and fill in the defaults. Raises ConfigError with the key at fault."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            section = Config.model_fields.get(str(first["loc"][0])) if len(first["loc"]) > 1 else None
            known = getattr(section.annotation, "model_fields", {}) if section else Config.model_fields
            raise ConfigError(f"setting {where}: unknown; known here: {', '.join(known)}") from None
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(f"setting {where}: {first['msg']}{more}") from None
    _check(config)
    return config


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"setting {dotted}: {parent} is a value, not a section")
    tree[leaf] = value


def _check(config: Config) -> None:
    """What can be told before anybody knows whether there is a bundle for the scorer."""
    from detector.methods import METHODS
    from jobs.formats.aliases import check_fields

    check_fields(config.fields)
    deciding, methods = config.judge.deciding_method, config.methods
    for name in (*(() if methods == AUTO else methods), *(() if deciding == "auto" else (deciding,))):
        if name not in METHODS:
            raise ConfigError(f"setting methods: no method {name!r}; known: {', '.join(METHODS)}")
    if methods != AUTO:
        _check_loo(config.loo, methods)
        if deciding != "auto":
            _check_deciding(deciding, methods)
    if config.judge.target_fpr is not None and config.judge.flag_budget is not None:
        raise ConfigError(
            "setting judge.target_fpr: judge.flag_budget sets the threshold too; give one of them"
        )
    if config.bundle == "none" or config.bundle_digest:
        config.resolved(config.bundle_digest, reads_attention=True)  # until the scorer is known


def _check_methods(config: Config, reads_attention: bool) -> None:
    """Hold filled-in settings against each other."""
    from detector.methods import METHODS

    methods, deciding = config.methods, config.judge.deciding_method
    trained = [name for name in methods if METHODS[name].trained]
    if trained and config.bundle == "none":
        raise ConfigError(
            f"setting methods: {trained[0]} needs a bundle, and none is used (none ships for this scorer and "
            "profile, or --bundle none); fit one with `leadline fit`, or leave it out"
        )
    if config.loo == "masked" and not reads_attention:
        raise ConfigError(
            "setting loo: masked hides passages from the scorer's attention, and scorers of this family have "
            "one of their own; use --loo exact"
        )
    if config.least_share and not reads_attention:
        raise ConfigError(
            "setting least_share: goes by the scorer's attention, which scorers of this family do not show; "
            "leave it at 0"
        )
    blind = [name for name in methods if METHODS[name].needs_attention and not reads_attention]
    if blind:
        raise ConfigError(
            f"setting methods: {blind[0]} reads attention, which scorers of this family do not show (or this "
            f"run is too old to have measured); leave {blind[0]} out of --methods"
        )
    _check_loo(config.loo, methods)
    _check_deciding(deciding, methods)
    if config.judge.target_fpr is not None and not METHODS[deciding].trained:
        raise ConfigError(
            f"setting judge.target_fpr: no false-alarm rate of {deciding} was measured; "
            "use judge.flag_budget, or a scorer with a bundle"
        )


def _check_deciding(deciding: str, methods: tuple[str, ...]) -> None:
    if deciding not in methods:
        raise ConfigError(f"setting judge.deciding_method: {deciding!r} is not among methods")


def _check_loo(loo: str, methods: tuple[str, ...]) -> None:
    from detector.methods import METHODS

    wanting = [name for name in methods if METHODS[name].needs_leave_one_out]
    if loo == "off" and wanting:
        raise ConfigError(
            f"setting loo: off leaves out what {', '.join(wanting)} reads; "
            f"leave {' and '.join(wanting)} out of --methods, or use --loo exact"
        )
