"""Discovery of quantities, and their options, which are checked when the configuration is made."""

import pytest

from rankscope_exporter import ConfigError, MonitorConfig

NO_ELEMENT = "does not select an element of an argument or result"
NOTHING = dict.fromkeys(("inputs", "outputs", "input_grads", "output_grads"), False)


@pytest.mark.parametrize(
    ("quantity", "options", "text"),
    [
        ("activations", {"targets": {"head": {"input": "tuple[2]:2"}}}, "element 2 of 2 does not exist"),
        ("activations", {"targets": {"head": {"input": "garbage"}}}, f"{NO_ELEMENT}: write 'tensor', 'tuple"),
        ("activations", {"targets": {"head": {"inputs": "tensor"}}}, "'inputs' is unknown; valid names are input, out"),
        ("activations", {"targets": {"head": "tensor"}}, "must be a table of input, output"),
        ("activations", {"targets": ["a"], "parts": {"b": {}}}, "is not in targets: add 'b' to targets"),
        ("activations", {"parts": ["a"]}, "parts must be a table of tables"),
        ("activations", {"inputs": 1}, "inputs must be true or false"),
        ("activations", NOTHING, "set one of them to true"),
        ("activations", {"all_module": True}, "Did you mean options.activations.all_modules"),
        ("attention", {"order": "s,b,d"}, "order must be 's,b,h,d' or these letters in another order, not 's,b,d'"),
        ("attention", {"query": -1}, "query must be the position or the name of an argument"),
        ("attention", {"mask": True}, "mask must be the position or the name of an argument"),
        ("attention", {"mask_true": True}, "mask_true must be 'auto', 'attends' or 'hides'"),
        ("attention", {"causal": "yes"}, "causal must be true, false or 'auto'"),
        ("attention", {"scale": "big"}, "scale must be a finite number"),
        ("attention", {"rows": 0}, "rows must be a whole number of at least 1"),
        ("linear", {"tolerance": 0}, "tolerance must be a number of at least 1e-05 and below 1"),
        ("router", {"top_k": 0}, "top_k must be a whole number of at least 1"),
        ("router", {"logits": "guessed"}, "logits must be 'returned' or 'computed', not 'guessed'"),
        ("router", {"output": "second"}, f"'second' {NO_ELEMENT}"),
        ("structure", {"output_dir": 3}, "output_dir must be the path of a folder"),
        ("structure", {"stack": True}, "Did you mean options.structure.stacks"),
        ("gradients", {"sum_micro_batches": "yes"}, "sum_micro_batches must be true, false or null, not 'yes'"),
        ("collectives", {"call_sites": ["("]}, "call_sites: '(' is not a regular expression"),
        ("collectives", {"call_sites": "train"}, "call_sites must be a list of regular expressions"),
        ("collectives", {"most_calls": 0}, "most_calls must be a whole number of at least 1"),
        ("hashes", {"evry": 3}, "evry"),
        ("hashes", {"of": "some"}, "of must be"),
    ],
)
def test_invalid_options_are_rejected(quantity, options, text):
    with pytest.raises(ConfigError, match="options") as raised:
        MonitorConfig(quantities=(quantity,), options={quantity: options})
    assert text in str(raised.value)
