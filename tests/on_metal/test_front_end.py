"""The kernels' text as a Mac's compiler gets it, through clang: MLX's prelude, our header, MLX's signature.

No Metal compiler is run. Clang sees what is not C++ for OpenCL, words that the prelude has taken, implicit conversions
to bf16 and arrays that stay out of registers.
"""

import re
import sys

import mlx.core as mx
import pytest

import metal_kernels
from deltatune.ops.decoding import attention_token, delta_token, sampled_token
from deltatune.ops.kernels.launch import header, kernel_of
from deltatune.ops.pointwise.conv import NormedHeads
from metal_front_end import compiling, launches, registers, text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the headers in mlx's wheel for Linux")
TOKEN = delta_token.DeltaToken(NormedHeads(16, 128, 1 / 128, 128**-0.5, 1e-6), 32, 128, 1e-6)
TOKEN_DTYPES = tuple((name, mx.bfloat16) for name in ("before", "taps", "dt_bias", "weight"))
# Between them every kernel, dtype, kind of gate, mask and option that changes its text.
CALLS = (
    launches.of_gated_delta(mx.bfloat16, 128),
    launches.of_gated_delta(mx.float32, 64, (1, 2), documents=True),
    launches.of_gated_delta(mx.float16, 192),
    launches.of_gated_delta(mx.bfloat16, 40, per_channel=True, documents=True),
    launches.of_attention(mx.bfloat16, 256),
    launches.of_attention(mx.bfloat16, 128),
    launches.of_attention(mx.float32, 64, documents=True, window=40, sinks=True),
    launches.of_trial(attention_token.trial_case(16, 4, 256, mx.float32)),
    launches.of_trial(delta_token.trial_case(TOKEN, True, 4, TOKEN_DTYPES)),
    launches.of_trial(sampled_token.trial_case(mx.bfloat16)),
)
KERNELS = [(call.name, launch) for call in CALLS for launch in call.launches]
IDS = [f"{name}: {launch.name}" for name, launch in KERNELS]
ANY = CALLS[0].launches[1]


@pytest.mark.parametrize("launch", [launch for _, launch in KERNELS], ids=IDS)
def test_clang_takes_each_kernel_without_implicit_conversions_to_bf16(launch):
    assert compiling.check(launch) == []


def test_mlx_gets_no_comment_and_no_indentation_to_join_at_each_launch(monkeypatch):
    texts = []
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda *given: texts.append(given[4]))
    kernel_of("metal", ANY.kernel, ("x",), ("y",), "a source of this test alone", 0, 0)
    assert not re.search(r"//|\n\s", texts[0])
    assert len(texts[0]) < 0.8 * len(header("metal", ANY.kernel.files))


PLANTED = {
    "an implicit conversion": ("{ elements[i] = static_cast<Element>(x); }", "{ elements[i] = x; }"),
    "an implicit constant": ("{ elements[i] = static_cast<Element>(x); }", "{ elements[i] = 0.0f; }"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_implicit_conversion_to_bf16_is_seen(name):
    old, new = PLANTED[name]
    kernel = text.kernel(ANY)
    assert old in kernel
    assert "put" in compiling.check(ANY, kernel.replace(old, new))


SIGMOID = "inline float sigmoid_of(float x) {"
REFUSED = {
    "another address space": ("\nthreadgroup Element* elements;", "\nconstant Element* elements;"),
    "a word of the prelude": (SIGMOID, "inline float log1p(float x) { return x; }\n" + SIGMOID),
    "a word that Metal lacks": ("return simd_sum(x);", "return __shfl_xor_sync(x);"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metal_text_that_a_mac_refuses_is_refused(name):
    old, new = REFUSED[name]
    kernel = text.kernel(ANY)
    assert old in kernel
    with pytest.raises(compiling.RefusedError, match="error:"):
        compiling.check(ANY, kernel.replace(old, new))


SCANS = {
    name: launch for name, (_, launch) in zip(IDS, KERNELS, strict=True) if launch.name.endswith(("scan", "reverse"))
}


# Heads of 40 with a gate a channel and documents have the most in their text, and are the quickest for clang.
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.weekly] * ("heads of 40" not in each)) for each in SCANS]
)
def test_no_scan_keeps_an_array_out_of_registers(name):
    assert registers.stack_arrays(compiling.lowered(SCANS[name])) == []


@pytest.mark.parametrize("launch", [call.launches[0] for call in CALLS[-3:]], ids=lambda launch: launch.name)
def test_kernels_of_a_token_have_registers_for_their_numbers(launch):
    assert registers.live_floats(compiling.lowered(launch)) <= metal_kernels.MOST_REGISTERS


def test_a_loop_that_is_not_unrolled_is_seen():
    kernel = text.kernel(ANY)
    start = kernel.index("void write_tiles_and_tails(")
    rolled = kernel[:start] + kernel[start:].replace("DELTATUNE_UNROLL", "", 1)
    assert registers.stack_arrays(compiling.lowered(ANY, rolled)) != []


def test_registers_alive_in_a_text_of_a_few_lines():
    lowered = """define dso_local void @launched(ptr addrspace(1) %a) {
entry:
  %x = load float, ptr addrspace(1) %a, align 4
  %y = load <4 x float>, ptr addrspace(1) %a, align 4
  br i1 true, label %loop, label %end

loop:                                             ; preds = %loop, %entry
  %sum = phi float [ %x, %entry ], [ %next, %loop ]
  %z = extractelement <4 x float> %y, i64 0
  %next = fadd float %sum, %z
  br i1 true, label %loop, label %end

end:                                              ; preds = %loop, %entry
  ret void
}
"""
    # At the end of an iteration: y, the sum, and z.
    assert registers.live_floats(lowered) == 6


def test_the_page_on_apple_gpus_equals_its_scripts_output():
    """Of the page, the digest of what it was made from is compared: to make it again takes half a minute."""
    made_from = f"<!-- made from {metal_kernels.made_from()} -->"
    assert metal_kernels.PAGE.read_text(encoding="utf-8").endswith(made_from + "\n"), "run scripts/metal_kernels.py"


def test_no_kernel_of_a_released_model_needs_more_registers_than_a_lane_has():
    assert "| **" not in metal_kernels.PAGE.read_text(encoding="utf-8")
