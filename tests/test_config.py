import pytest

from deltatune.config import LoraConfig, TrainConfig, build, read_yaml
from deltatune.errors import UserError


def test_yaml_of_mlx_lm_lora_is_read(tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("model: here\nlearning_rate: 1e-5\nlora_parameters: {rank: 4, scale: 2, dropout: 0.0}\n")
    config = build(TrainConfig, read_yaml(file), str(file))
    assert (config.model, config.learning_rate) == ("here", 1e-5)
    assert config.lora_parameters == LoraConfig(rank=4, scale=2.0, dropout=0.0)


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.5e-5", "2e4", "-3e-2", ".5e1", "1.e-3"])
def test_exponents_are_numbers(tmp_path, number):
    file = tmp_path / "c.yaml"
    file.write_text(f"learning_rate: {number}\n")
    assert read_yaml(file)["learning_rate"] == float(number)


def test_words_with_an_e_stay_words(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: 1e5b\nadapter_path: e5\n")
    assert read_yaml(file) == {"model": "1e5b", "adapter_path": "e5"}


def test_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown key 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        build(TrainConfig, {"learning_rat": 1.0}, "c.yaml")
    with pytest.raises(UserError, match=r"lora_parameters: unknown key 'rnak' \(did you mean 'rank'\?\)"):
        build(TrainConfig, {"lora_parameters": {"rnak": 1}}, "c.yaml")


@pytest.mark.parametrize(("key", "value"), [("iters", "many"), ("iters", True), ("model", 3), ("batch_size", 1.5)])
def test_wrong_type_is_refused(key, value):
    with pytest.raises(UserError, match=f"c.yaml: {key}: expected"):
        build(TrainConfig, {key: value}, "c.yaml")


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    with pytest.raises(UserError, match="not YAML"):
        read_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="expected `key: value`"):
        read_yaml(tmp_path / "list.yaml")
