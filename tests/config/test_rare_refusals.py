"""Settings that nobody sets by chance are refused too: the keys with their values, and what to do."""

import pytest
from config_errors import first_place

from megajax.config import LearningRateSchedule, load_config, register_schedule
from megajax.errors import ConfigError
from megajax.model import Encoder, register_encoder
from megajax.options.schedules import SCHEDULES
from megajax.schema.fields import Section
from megajax.schema.keys import keys

BASE = """\
model: {num_layers: 2, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
run: {steps: 20}
"""
FILES = "data.kind=indexed data.train=t data.split=8,1,1"
YARN, DYNAMIC = (f"model.rope_scaling={{kind:{kind},factor:2}}" for kind in ("yarn", "dynamic"))
ROUTER = "model.num_experts=8 model.experts_per_token"
DELTA, MASKED = "model.block_pattern=[gated_deltanet,dense]", "model.causal=false objective.kind=masked_tokens"
# Settings, what the sentence says of them, and the way out
REFUSED = [
    (
        f"{FILES} data.order=megatron data.train_samples=159",
        "data.train_samples=159 is less than the 160 samples of run.steps=20 and batch.global_size=8",
        "set data.train_samples=160 or more",
    ),
    (f"{FILES} data.valid_sets=[{{name:a,prefix:p}},{{name:a,prefix:q}}]", "two sets called a", "its own name"),
    (f"{FILES} data.valid_sets=[{','.join(f'{{name:{n},prefix:p}}' for n in 'abb')}]", "two sets called b", "its own"),
    (f"{ROUTER}=1", "experts_per_token=1 .*pre_softmax=false", "set model.router.pre_softmax=true"),
    (f"{ROUTER}=1 model.router.sinkhorn=true", "experts_per_token=1", "set model.router.score_function=sigmoid"),
    (f"{ROUTER}=2 model.router.normalise=false", "normalise=false .*pre_softmax=false", "pre_softmax=true"),
    (
        "model.position=relative model.relative_buckets=32 model.relative_max_distance=16",
        "model.relative_buckets=32 and model.relative_max_distance=16",
        "above half of the number of buckets",
    ),
    (f"{YARN} model.rope_theta=1", "rope_scaling.kind=yarn .* model.rope_theta=1", "use more than 1"),
    (f"{DYNAMIC} model.rope_fraction=0.25", "kind=dynamic .* model.rope_fraction=0.25", "rotate 4 or more dimensions"),
    ("model.rope_sections=[1,1,1]", r"model.rope_sections=\[1, 1, 1\] has 3 pairs", "make their sum 4, half of 8"),
    (
        "model.rope_sections=[1,1,2] model.rope_interleaved=true",
        r"model.rope_interleaved=true .* model.rope_sections=\[1, 1, 2\]",
        "make the first number the largest",
    ),
    (
        "optimizer.kind=muon optimizer.muon.steps=1 optimizer.muon.coefficients=[[3,-4,2],[2,-1,0.5]]",
        "optimizer.muon.coefficients has those of 2 steps, more than optimizer.muon.steps=1",
        "set optimizer.muon.steps=2",
    ),
    ("mesh.experts_over=[tensor,tensor]", "names tensor twice", "name each once"),
    ("data.train={file:3}", "data.train.* is not the path of a file", "write one"),
    (
        f"{DELTA} {MASKED}",
        "model.causal=false needs bidirectional, which gated_deltanet",
        "let tokens see those before",
    ),
]
ALLOWED = [
    "optimizer.kind=muon optimizer.muon.steps=2 optimizer.muon.coefficients=[[3,-4,2],[2,-1,0.5]]",
    f"{FILES} data.order=megatron data.train_samples=160",
    f"{FILES} data.train_samples=1",
    f"{FILES} data.valid_sets=[{{name:a,prefix:p}},{{name:b,prefix:q}}]",
    f"{ROUTER}=1 model.router.score_function=sigmoid",
    "model.position=relative model.relative_buckets=32 model.relative_max_distance=17",
    "model.rope_sections=[2,1,1] model.rope_interleaved=true",
    "model.rope_sections=[1,1,2]",
    f"{YARN} model.rope_theta=1.5",
    f"{DYNAMIC} model.rope_fraction=0.5",
    MASKED,
    DELTA,
]


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(BASE, encoding="utf-8")


def overrides_of(settings: str) -> list[str]:
    return [text.replace(":", ": ") for text in settings.split()]


@pytest.mark.parametrize(("settings", "problem", "cure"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_rare_mistake_is_a_sentence(settings, problem, cure):
    with pytest.raises(ConfigError, match=f"{problem}.*: .*{cure}") as error:
        load_config("x.yaml", overrides_of(settings))
    assert "the command line" in first_place(str(error.value))


@pytest.mark.parametrize("settings", ALLOWED)
def test_the_nearest_setting_is_none(settings):
    load_config("x.yaml", overrides_of(settings))


# The lists of the schema, by what it means that one has the same entry twice
TWICE = {
    "it is refused": (
        "mesh.experts_over run.hooks data.valid_sets data.stages optimizer.groups model.vision.deepstack_layers"
    ),
    "it counts once": (
        "run.extensions optimizer.groups.N.parameters lora.targets checkpoint.allow_changes model.vision.global_layers"
    ),
    "its shares are added": "data.train data.valid data.test data.stages.N.train data.denoisers",
    "it is another position": (
        "pipeline.layout model.block_pattern model.layer_pattern model.rope_pattern model.rope_sections"
        " model.rope_scaling.long_factors model.rope_scaling.short_factors model.multipliers.mlp_multipliers"
        " model.multipliers.ssm_multipliers optimizer.muon.coefficients"
    ),
}


def test_each_list_has_a_meaning_for_an_entry_that_is_there_twice():
    lists = {key for key, field in keys() if "tuple[" in str(field.annotation)}
    assert lists == {key for named in TWICE.values() for key in named.split()}


def test_the_widths_that_a_latent_is_told_to_have_are_deepseeks():
    model = load_config("deepseek_v3").model
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in names:
        others = [f"model.{other}=8" for other in names if other != name]
        with pytest.raises(ConfigError, match=f"needs model.{name} .*: set model.{name}={getattr(model, name)}, as"):
            load_config("x.yaml", ["model.kv_lora_rank=8", *others])


def flat(schedule):
    return lambda step: schedule.learning_rate


def test_a_schedule_is_checked_when_it_is_registered():
    before = dict(SCHEDULES)
    for schedule, sentence in (
        (LearningRateSchedule("mine"), "mine has no function `rate`: give one"),
        (LearningRateSchedule("mine", ("steps",), rate=flat), "mine reads steps: use min_learning_rate"),
        (LearningRateSchedule("cosine", rate=flat), "cosine exists already"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            register_schedule(schedule)
    assert dict(SCHEDULES) == before


class Power:
    class Settings(Section):
        power: float


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("test_power", "{power: 2, powr: 1}", "schedule.settings.powr is no setting of Power .*: it has power"),
        ("test_power", "{power: half}", "schedule.settings.power=half is wrong: .*: correct it"),
        ("test_power", "{}", "schedule.settings.power is not set .*: add it"),
        ("test_flat", "{power: 2}", "schedule.settings.power is no setting of flat .*: it has none"),
        ("cosine", "{power: 2}", "schedule.settings=.* needs a registered schedule.*, or remove schedule.settings"),
    ],
)
def test_wrong_settings_of_a_schedule_are_a_sentence(monkeypatch, kind, settings, sentence):
    for name, rate in (("test_power", Power), ("test_flat", flat)):
        monkeypatch.setitem(SCHEDULES, name, LearningRateSchedule(name, rate=rate))
    with pytest.raises(ConfigError, match=sentence):
        load_config("x.yaml", [f"schedule.kind={kind}", f"schedule.settings={settings}"])


@pytest.mark.parametrize("name", ["none", "layers", "encoder"])
def test_an_encoder_has_a_name_of_its_own(name):
    """Neither a value of model.encoder.kind nor the stream of a built-in encoder."""

    class Mine(Encoder):
        NAME = name

    with pytest.raises(ConfigError, match=f"Mine has the NAME {name}, which megajax uses: give it another one"):
        register_encoder(Mine)
