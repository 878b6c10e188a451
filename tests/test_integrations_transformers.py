"""transformers over flashtile: tiny models made here, against transformers' own attention; no download.

Eager attention in fp32 is the reference: torch's SDPA knows neither softcap nor sinks. In bf16 the largest error of logits and
of each gradient may be twice that of eager (Llama: SDPA) in bf16.
"""

import copy
import warnings
from itertools import product
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flashtile import ShapeError, UnsupportedError, ValueRangeError, attention_varlen  # noqa: E402
from flashtile.integrations import transformers as integration  # noqa: E402

SMALL = dict(vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             tie_word_embeddings=False)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    # a window in every layer
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=5)),
    # softcap, and a window in every other layer
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=8)
    ),
    # sinks, and a window in every other layer
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
                                  experts_implementation="eager")  # fmt: skip
    ),
}
# transformers' own implementation that has the model's features
OWN = {"llama": "sdpa", "mistral": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}
TOKENS = torch.arange(3, 3 + 2 * 14).view(2, 14) * 7 % 58 + 3
LEFT, RIGHT, HOLE = (torch.ones(2, 14, dtype=torch.int64) for _ in range(3))
LEFT[1, :4] = RIGHT[1, 9:] = 0
HOLE[0, 3:5] = 0
# Of the largest value; the yardstick may happen to be exact
FLOORS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
MASKS = {"no mask": None, "left padding": LEFT, "right padding": RIGHT, "padding inside": HOLE}


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def model(request, device):
    torch.manual_seed(0)
    model = MODELS[request.param]()
    model.own = OWN[request.param]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at the start of training: attention that looks somewhere, sinks that count
            parameter.mul_(8 if parameter.dim() > 1 else 1)
            if "sinks" in name:
                parameter.normal_()
    return model.eval().to(device)


def logits_and_gradients(model, implementation, dtype, mask, **arguments):
    """Logits of tokens and gradients by name, of a copy of the model in dtype."""
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(implementation)
    mask = None if mask is None else mask.to(model.device)
    inputs = {"input_ids": TOKENS.to(model.device), "attention_mask": mask, "use_cache": False} | arguments
    logits = model(**inputs).logits
    if mask is not None:
        logits = logits[mask.bool()]
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits)
    (logits * weights).sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mask", MASKS)
def test_training(model, mask):
    """Logits and all gradients, in fp32 and in bf16."""
    if mask == "padding inside" and getattr(model.config, "sliding_window", None):
        pytest.skip("eager counts padding as part of a window")
    mask = MASKS[mask]
    exact = logits_and_gradients(model, "eager", torch.float32, mask)
    for dtype, own_error in ((torch.float32, 0), (torch.bfloat16, 2)):
        own = logits_and_gradients(model, model.own, dtype, mask)
        ours = logits_and_gradients(model, integration.NAME, dtype, mask)
        assert ours.keys() == own.keys() == exact.keys()
        for name, want in exact.items():
            scale = want.abs().max().item()
            error, allowed = ((x[name] - want).abs().max().item() for x in (ours, own))
            assert error <= own_error * allowed + FLOORS[dtype] * scale, (name, dtype, error, allowed, scale)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_do_not_see_each_other(model, by):
    tokens = TOKENS[:1].to(model.device)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None].to(model.device)
    packing = {"position_ids": positions}
    if by == "cu_seq_lens":
        cu_seqlens = torch.tensor([0, 5, 14], dtype=torch.int32, device=model.device)
        packing |= dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=9, max_length_k=9)
    packed = {"input_ids": tokens, "use_cache": False, **packing}
    model.set_attn_implementation(integration.NAME)
    with torch.no_grad():
        got = model(**packed).logits
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in (tokens[:, :5], tokens[:, 5:])], 1)
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [[*range(5), *range(20, 29)], range(3, 17), range(0, 28, 2)], ids=["gap", "late", "step"])
@pytest.mark.parametrize("more", [{"attention_mask": torch.ones(1, 14)}, {"use_cache": True}], ids=["mask", "cache"])
def test_positions_with_gaps_are_one_sequence(positions, more):
    """As in eager attention, whose mask hides nothing for them."""
    model, logits = MODELS["llama"]().eval(), {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(TOKENS[:1], position_ids=torch.tensor([*positions])[None], **more).logits
    torch.testing.assert_close(logits[integration.NAME], logits["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_position_ids_may_be_a_buffer_that_is_written_again(mode):
    model = MODELS["llama"]().eval()
    model.set_attn_implementation(integration.NAME)
    plain, packed = torch.arange(14)[None], torch.cat([torch.arange(5), torch.arange(9)])[None]

    def logits(position_ids):
        return model(TOKENS[:1], position_ids=position_ids, use_cache=False).logits

    with mode():
        buffer = plain.clone()
        for positions in (plain, packed, plain):
            buffer.copy_(positions)
            assert torch.equal(logits(buffer), logits(positions.clone()))


@pytest.mark.parametrize("mask", ["no mask", "left padding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, mask, cache):
    """The same tokens, over the window's length and over a cache that is not full."""
    if cache == "static" and mask == "no mask":
        mask = None
    seen = torch.ones_like(TOKENS) if mask is None or MASKS[mask] is None else MASKS[mask]
    arguments = dict(max_new_tokens=7, do_sample=False, attention_mask=seen.to(model.device))
    if cache == "static":
        arguments["cache_implementation"] = "static"
    tokens = {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(TOKENS.to(model.device), disable_compile=True, **arguments)
    assert torch.equal(*tokens.values())


def test_static_cache_without_a_mask():
    """What was never written into the cache is not looked at."""
    model = MODELS["llama"]().eval()
    model.set_attn_implementation(integration.NAME)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        parts = [model(TOKENS[:, part], past_key_values=cache).logits for part in (slice(0, 9), slice(9, 10), slice(10, 14))]
        model.set_attn_implementation("eager")
        whole = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_padded_tokens_get_0_with_a_window_to_both_sides():
    q, k, v = torch.randn(3, 2, 2, 14, 8).unbind()
    for x in (q, q.clone().requires_grad_()):
        out = integration.attention(torch.nn.Identity(), x, k, v, LEFT.bool(), is_causal=False, sliding_window=6)[0]
        assert (out[~LEFT.bool()] == 0).all() and (out[LEFT.bool()] != 0).all()


def test_a_mask_shorter_than_the_sequence_hides_the_rest():
    """As transformers fills it up, with padding."""
    model, logits = MODELS["llama"]().eval(), {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(TOKENS, attention_mask=torch.ones(2, 11)).logits[:, :11]
    torch.testing.assert_close(logits[integration.NAME], logits["eager"], rtol=1e-4, atol=1e-4)


def test_head_dims_that_are_no_multiple_of_8():
    """Forward, gradients, and decoding over a cache."""
    sizes = SMALL | {"hidden_size": 60, "head_dim": 10}
    model, logits, gradients = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), {}, {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(TOKENS, labels=TOKENS)
        out.loss.backward()
        gradients[implementation] = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        with torch.no_grad():
            step = model(TOKENS[:, -1:], past_key_values=model(TOKENS[:, :-1]).past_key_values)
            padded = model(TOKENS, attention_mask=LEFT).logits[LEFT.bool()]
        logits[implementation] = torch.cat([out.logits.flatten(0, 1), padded, step.logits[:, 0]])
    for got in (logits, gradients):
        torch.testing.assert_close(got[integration.NAME], got["eager"], rtol=1e-4, atol=1e-5)


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.3")
    with pytest.raises(UnsupportedError, match="transformers: expected version 5 or newer, got 4.57.3"):
        integration.register()


@pytest.mark.parametrize("after", [0, 1])
def test_static_cache_with_a_mask_as_long_as_it(after):
    """Whatever the mask says of slots behind the last query."""
    model = MODELS["llama"]().eval()
    mask = torch.nn.functional.pad(LEFT, (0, 18), value=after)
    logits = {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            parts = [model(TOKENS[:, part], attention_mask=mask, past_key_values=cache).logits
                     for part in (slice(0, 9), slice(9, 10), slice(10, 14))]  # fmt: skip
        logits[implementation] = torch.cat(parts, 1)[LEFT.bool()]
    torch.testing.assert_close(logits[integration.NAME], logits["eager"], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def bart():
    torch.manual_seed(0)
    small = dict(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, dropout=0.0,
                 decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64)  # fmt: skip
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**small))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model.eval()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen", [1, 5, 14, 20])
def test_decoder_looks_at_an_encoder(bart, mask, seqlen):
    """The mask is that of the encoder's tokens; of queries it says nothing."""
    tokens = torch.arange(2 * seqlen).view(2, seqlen) * 5 % 58 + 3
    got = {}
    for implementation in ("eager", integration.NAME):
        bart.set_attn_implementation(implementation)
        bart.zero_grad()
        arguments = dict(input_ids=TOKENS, attention_mask=MASKS[mask], decoder_input_ids=tokens, use_cache=False)
        logits = bart(**arguments).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        with torch.no_grad():
            inference = bart(**arguments).logits
        gradients = {name: p.grad for name, p in bart.named_parameters() if p.grad is not None}
        got[implementation] = {"logits": logits.detach(), "inference": inference} | gradients
    assert got[integration.NAME].keys() == got["eager"].keys()
    for name, want in got["eager"].items():
        # A bias of keys moves all scores of a row alike: its gradient is 0 by cancellation, of terms like those of the weight's
        scale = got["eager"][name.replace("k_proj.bias", "k_proj.weight")].abs().max()
        assert (got[integration.NAME][name] - want).abs().max() <= 1e-5 * scale + 1e-6, name


def test_a_bias_of_the_scores_is_refused():
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    model = transformers.T5EncoderModel._from_config(config, attn_implementation=integration.NAME)
    with pytest.raises(UnsupportedError, match=r"position_bias: expected None, got shape \(1, 4, 14, 14\)"):
        model(TOKENS)


@pytest.mark.parametrize("make", [
    lambda: transformers.BloomForCausalLM._from_config(
        transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4), attn_implementation=integration.NAME),
    lambda: transformers.MPNetModel._from_config(
        transformers.MPNetConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        attn_implementation=integration.NAME),
], ids=["bloom", "mpnet"])  # fmt: skip
def test_a_model_with_attention_of_its_own_is_refused(make):
    """They take a mask of scores: with another one causal models were not, and encoders saw padding."""
    with pytest.raises(UnsupportedError, match="attn_implementation.*models of a .*Config attend by themselves"):
        make()(TOKENS, attention_mask=torch.ones(2, 14))


def test_what_attends_by_itself_is_known_by_its_models():
    """Of a class of configs made from another one too; not before a model is loaded, and not without its source."""
    derived = type("Derived", (transformers.BloomConfig,), {})
    assert transformers.BloomModel and transformers.LlamaModel
    assert integration._attends_by_itself(derived) and not integration._attends_by_itself(transformers.LlamaConfig)
    unknown = type("Unknown", (transformers.PretrainedConfig,), {})
    assert not integration._attends_by_itself(unknown) and unknown not in integration._BY_THEMSELVES
    assert not integration._has_code_of_its_own(type("Frozen", (), {"__module__": "sys"}))


def test_a_mask_is_made_in_a_graph():
    """The look at models is none of the graph's, which would warn of it, or break there."""
    integration._BY_THEMSELVES.clear()
    torch._dynamo.reset()
    config = transformers.LlamaConfig(**SMALL)
    compiled = torch.compile(lambda x: x * (integration.padding_mask(2, 14, 14, config=config) is None), backend="aot_eager",
                             fullgraph=True)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_a_choice_of_keys_is_refused(name):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=rf"{name}: expected None, got shape \(1, 4, 2\).*sdpa"):
        integration.attention(torch.nn.Identity(), q, q, q, None, is_causal=True, **{name: torch.zeros(1, 4, 2)})
    assert integration.attention(torch.nn.Identity(), q, q, q, None, is_causal=True, **{name: None})[0].shape == (1, 4, 2, 8)


def test_a_module_that_does_not_say_whether_it_is_causal_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="module: expected an attribute is_causal, got Identity"):
        integration.attention(torch.nn.Identity(), q, q, q, None)
    assert integration.attention(torch.nn.Identity(), q, q, q, None, is_causal=False)[0].shape == (1, 4, 2, 8)


def test_masks_that_hide_something_else_are_refused():
    config = transformers.LlamaConfig(**SMALL, attention_chunk_size=8)
    config._attn_implementation = integration.NAME
    images = torch.tensor([[-1, 0, 0, -1]])
    make, chunked = transformers.masking_utils.create_causal_mask, transformers.masking_utils.create_chunked_causal_mask
    with pytest.raises(UnsupportedError, match="mask_function: expected causal or not.* got blockwise_overlay, or_masks"):
        make(config, torch.zeros(1, 4, 48), None, None, block_sequence_ids=images)
    with pytest.raises(UnsupportedError, match="got chunked_overlay"):
        chunked(config, torch.zeros(1, 9, 48), None, None)
    assert chunked(config, torch.zeros(1, 8, 48), None, None).all()


MAKERS = {"causal": "create_causal_mask", "window": "create_sliding_window_causal_mask",
          "both sides": "create_bidirectional_sliding_window_mask", "all": "create_bidirectional_mask"}  # fmt: skip


# transformers finds packed sequences in causal masks without padding; eager counts padding as part of a window
@pytest.mark.parametrize(("name", "tokens"), [
    *product(MAKERS, ["all", "left padding"]), ("causal", "padding inside"), ("all", "padding inside"),
    ("causal", "packed"), ("window", "packed"),
])  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_holds_whatever_a_layer_says(name, tokens, is_causal):
    """Some layers pass no window, no position_ids, or say that they are not causal, and rely on the mask."""
    config = transformers.LlamaConfig(**SMALL, sliding_window=4)
    make, arguments = getattr(transformers.masking_utils, MAKERS[name]), {}
    padding = {"left padding": LEFT[1:], "padding inside": HOLE[:1]}.get(tokens)
    if tokens == "packed":
        arguments["position_ids"] = torch.cat([torch.arange(5), torch.arange(9)])[None]
    if name in ("causal", "window"):
        arguments["past_key_values"] = None

    def mask(implementation):
        config._attn_implementation = implementation
        return make(config, inputs_embeds=torch.zeros(1, 14, 48), attention_mask=padding, **arguments)

    layer, (q, k, v) = torch.nn.Identity(), torch.randn(3, 1, 2, 14, 8)
    layer.is_causal = is_causal
    got, _ = integration.attention(layer, q, k, v, mask(integration.NAME))
    bias = mask("eager")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
    seen = slice(None) if padding is None else padding[0].bool()
    torch.testing.assert_close(got[:, seen], want[:, seen])


def test_what_a_mask_shows_is_known_in_a_graph_of_a_layer():
    config = transformers.LlamaConfig(**SMALL, sliding_window=4)
    config._attn_implementation = integration.NAME
    mask = transformers.masking_utils.create_sliding_window_causal_mask(config, torch.zeros(2, 14, 48), None, None)
    layer, q = torch.nn.Identity(), torch.randn(2, 2, 14, 8)
    want = integration.attention(layer, q, q, q, mask)[0]
    torch._dynamo.reset()
    attend = torch.compile(lambda q, mask: integration.attention(layer, q, q, q, mask)[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(attend(q, mask), want)


def test_places_in_images_are_no_packed_sequences():
    """position_ids of three dims, which begin anew for each of height, width and time."""
    layer, q = torch.nn.Identity(), torch.randn(1, 2, 14, 8)
    positions = torch.arange(14).expand(3, 1, 14)
    got = integration.attention(layer, q, q, q, None, is_causal=True, position_ids=positions)[0]
    assert torch.equal(got, integration.attention(layer, q, q, q, None, is_causal=True)[0])


def test_packed_sequences_in_a_larger_batch_are_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation(integration.NAME)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None].expand(2, -1)
    with pytest.raises(UnsupportedError, match="position_ids: expected packed sequences in a batch of 1, got a batch of 2"):
        model(TOKENS, position_ids=positions, use_cache=False)


def test_dropout_is_used_in_training():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attention_dropout=0.5)).train()
    model.set_attn_implementation(integration.NAME)
    first, second = (model(TOKENS, attention_mask=LEFT).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(model.eval()(TOKENS, attention_mask=LEFT).logits for _ in range(2)))


def test_a_graph_of_a_batch_of_1_needs_the_lengths_of_packed_sequences():
    """position_ids are looked at between two graphs; with fullgraph=True the error says what to pass."""
    layer, q = torch.nn.Identity(), torch.randn(1, 2, 14, 8)
    positions, starts = torch.cat([torch.arange(5), torch.arange(9)])[None], torch.tensor([0, 5, 14])
    lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=9, max_length_k=9)

    def attend(q, **packing):
        return integration.attention(layer, q, q, q, None, is_causal=True, position_ids=positions, **packing)[0]

    def compiled(fullgraph):
        torch._dynamo.reset()
        return torch.compile(attend, backend="aot_eager", fullgraph=fullgraph)

    assert torch.equal(compiled(False)(q), attend(q)) and torch.equal(compiled(True)(q, **lengths), attend(q))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass cu_seq_lens_q"):
        compiled(True)(q)


def test_a_compiled_model_has_a_break_where_it_makes_its_mask():
    model = MODELS["llama"]().eval()
    model.set_attn_implementation(integration.NAME)
    torch._dynamo.reset()
    with torch.no_grad():
        want = model(TOKENS, use_cache=False).logits
        got = torch.compile(model, backend="aot_eager")(TOKENS, use_cache=False).logits
        torch.testing.assert_close(got, want)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="the functions that a model's mask is made of"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS, use_cache=False)


def test_masks_of_four_dims_are_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(UnsupportedError, match=r'attention_mask: expected \(batch, seqlen\), got shape \(2, 1, 14, 14\)'):
        model(TOKENS, attention_mask=torch.ones(2, 1, 14, 14, dtype=torch.bool))


def test_names_that_transformers_takes_for_its_own_are_refused():
    with pytest.raises(ValueRangeError, match="name: expected a name without \"flash\", got 'flashtile'"):
        integration.register("flashtile")


def test_what_is_known_of_a_mask_goes_with_it():
    mask = torch.ones(1, 4, dtype=torch.bool)
    integration._padding(mask)
    assert mask in integration._paddings
    before = len(integration._paddings)
    del mask
    assert len(integration._paddings) == before - 1
    assert attention_varlen is integration.api.attention_varlen


def test_a_mask_may_be_a_buffer_that_is_written_again():
    module = SimpleNamespace(is_causal=True)
    query, key, value = torch.randn(3, 2, 2, 6, 8).unbind()
    mask = torch.ones(2, 6, dtype=torch.bool)
    first, _ = integration.attention(module, query, key, value, mask)
    mask[1, :3] = False
    again, _ = integration.attention(module, query, key, value, mask)
    expected, _ = integration.attention(module, query, key, value, mask.clone())
    assert torch.equal(again, expected) and not torch.equal(first, again)
    with torch.inference_mode():
        buffer = torch.ones(2, 6, dtype=torch.bool)
        integration.attention(module, query, key, value, buffer)
        buffer[1, :3] = False
        assert torch.equal(integration.attention(module, query, key, value, buffer)[0], expected)


@pytest.mark.parametrize(("rows", "columns", "hidden", "message"), [
    (2, 8, 5, "at most 6 columns, one for each key"), (2, 4, 0, "at least 6 columns, one for each query"),
    (1, 6, 0, "2 rows, one for each sequence"),
])  # fmt: skip
def test_a_mask_of_another_shape_is_refused(rows, columns, hidden, message):
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask[-1, hidden] = False
    with pytest.raises(ShapeError, match=f"attention_mask: expected {message}, got shape"):
        integration.attention(SimpleNamespace(is_causal=True), *torch.randn(3, 2, 2, 6, 8), mask)
