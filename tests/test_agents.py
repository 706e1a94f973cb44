"""Agents: constrained choice against teacher forcing, the endpoint against a local server, scripts and the learned policy against their rules."""

import http.server
import json
import math
import pickle
import threading

import numpy as np
import pytest
import torch

import nbkit
from nbkit.agents import (
    ChatEndpoint,
    Choice,
    ChoiceScorer,
    Deferring,
    Eager,
    HFChoiceAgent,
    LearnedPolicy,
    OpenAICompatibleAgent,
    Restart,
    read_value,
)
from nbkit.agents.endpoint import tool_schemas
from nbkit.agents.learned import FEATURES, STEPS, build_policy, demonstrations
from nbkit.envs.office import OfficeOps, plan
from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.methods.clarification_timing import ForcedInjection, Outcomes, with_word

SUITE = OfficeOps()
OPTIONS = ("tea", "a cup of tea", "rice", "candles and thread")


# ---- constrained choice ----


@pytest.fixture(scope="module")
def tiny():
    """A random Llama of one layer with the tokenizer of SmolLM2."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from nbkit.loaders.models import tokenizer_file

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    # Larger weights than a fresh model has: differences between options must not drown in rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model, AutoTokenizer.from_pretrained(tokenizer_file().parent, local_files_only=True)


def forced(model, tokenizer, prefix, option, window=None):
    """Log-likelihood of an option by reading prefix and option in one pass."""
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prefix, " " + option))
    head = head if window is None else head[-window:]
    with torch.inference_mode():
        logp = model(torch.tensor([head + tail])).logits[0].double().log_softmax(-1)
    return sum(logp[len(head) + i - 1, token].item() for i, token in enumerate(tail)), len(tail)


PREFIXES = ("We sell", "We sell tea and rice. They want", "We sell tea and rice. They buy", "Nothing in common with that. We", "We sell")


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_scores_equal_teacher_forcing_whatever_was_read_before(tiny, reuse, window):
    scorer = ChoiceScorer(*tiny, reuse=reuse, window=window)
    for prefix in PREFIXES:
        scorer.memo.clear()
        choice = scorer(prefix, OPTIONS)
        for i, option in enumerate(OPTIONS):
            want, tokens = forced(*tiny, prefix, option, window)
            assert choice.sum[i] == pytest.approx(want, abs=2e-4) and choice.tokens[i] == tokens
            assert choice.mean[i] == pytest.approx(want / tokens, abs=2e-4)


def test_pmi_is_the_gain_over_the_null_prefix(tiny):
    scorer = ChoiceScorer(*tiny, null="They want")
    first, want = scorer(PREFIXES[1], OPTIONS), [forced(*tiny, PREFIXES[1], o)[0] - forced(*tiny, "They want", o)[0] for o in OPTIONS]
    np.testing.assert_allclose(first.pmi, want, atol=4e-4)
    again = scorer(PREFIXES[1], OPTIONS, null="We sell")
    np.testing.assert_allclose(again.pmi, [forced(*tiny, PREFIXES[1], o)[0] - forced(*tiny, "We sell", o)[0] for o in OPTIONS], atol=4e-4)
    assert ChoiceScorer(*tiny)(PREFIXES[1], OPTIONS).pmi is None


def test_order_of_options_changes_no_score(tiny):
    scorer = ChoiceScorer(*tiny)
    forwards, backwards = scorer(PREFIXES[1], OPTIONS), scorer(PREFIXES[1], OPTIONS[::-1])
    np.testing.assert_allclose(forwards.sum, backwards.sum[::-1], atol=1e-4)
    assert forwards.options[forwards.pick()] == backwards.options[backwards.pick()]


def test_what_was_read_is_not_read_again(tiny):
    scorer = ChoiceScorer(*tiny)
    scorer(PREFIXES[1], ("tea",))
    before = scorer.tokens_read
    assert scorer(PREFIXES[1], ("tea",)) is scorer(PREFIXES[1], ("tea",)) and scorer.tokens_read == before
    scorer(PREFIXES[2], ("tea",))
    assert scorer.tokens_read == before + 1, "only the last word differs"
    scorer(PREFIXES[1] + " more", ("tea",))
    assert scorer.tokens_read == before + 3


def test_an_interrupted_reading_is_not_taken_for_a_whole_one(tiny):
    scorer = ChoiceScorer(*tiny)
    scorer(PREFIXES[0], OPTIONS)
    model, scorer.model = scorer.model, None
    with pytest.raises(AttributeError):
        scorer(PREFIXES[1], OPTIONS)
    scorer.model = model
    assert scorer(PREFIXES[1], OPTIONS).sum[0] == pytest.approx(forced(*tiny, PREFIXES[1], OPTIONS[0])[0], abs=2e-4)


def test_a_model_that_forgets_is_refused_unless_nothing_is_reused(tiny):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    scorer = ChoiceScorer(model, tiny[1])
    scorer(PREFIXES[1], ("tea",))
    with pytest.raises(UnsupportedModelError, match="reuse=False"):
        scorer(PREFIXES[2], ("tea",))
    patient = ChoiceScorer(model, tiny[1], reuse=False)
    for prefix in PREFIXES[1:3]:
        assert patient(prefix, ("tea",)).sum[0] == pytest.approx(forced(model, tiny[1], prefix, "tea")[0], abs=1e-4)


def test_entropy_and_probabilities():
    choice = Choice(("a", "b", "c"), np.log([0.5, 0.25, 0.25]), np.zeros(3), None, np.ones(3))
    np.testing.assert_allclose(choice.probabilities(), [0.5, 0.25, 0.25])
    assert choice.entropy() == pytest.approx(1.5 * math.log(2)) and choice.entropy("mean") == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda m, t: ChoiceScorer(m, None), "tokenizer"),
        (lambda m, t: ChoiceScorer(m, t, window=0), "window"),
        (lambda m, t: ChoiceScorer(m, t)("a", ()), "options"),
        (lambda m, t: ChoiceScorer(m, t)("a", ("",)), "option"),
        (lambda m, t: ChoiceScorer(m, t)("", ("a",)), "prefix"),
        (lambda m, t: ChoiceScorer(m, t)("a", ("a",)).pick("pmi"), "null"),
        (lambda m, t: ChoiceScorer(m, t)("a", ("a",)).pick("max"), "sum, mean, pmi"),
        (lambda m, t: HFChoiceAgent(m, t, score="max"), "score"),
        (lambda m, t: HFChoiceAgent(m, t, window=10), "window"),
    ],
)
def test_wrong_choices_are_refused(tiny, call, message):
    with pytest.raises(InputError, match=message):
        call(*tiny)


# ---- the language model as an agent ----


def test_language_model_never_reads_what_it_was_not_told(tiny):
    """Two jobs that differ in the hidden word alone are worked on alike until the message."""
    agent, experiment = HFChoiceAgent(*tiny), ForcedInjection(SUITE)
    for variant in SUITE.variants[:4]:
        other = with_word(variant, next(word for word in variant.options if word != variant.answer))
        traces = [experiment.episode(agent, v, arm="never").trace for v in (variant, other)]
        assert traces[0] == traces[1]


def test_window_keeps_the_request_and_the_newest_lines(tiny):
    agent, variant = HFChoiceAgent(*tiny, window=160), SUITE.variants[0]
    with SUITE.make(variant) as episode:
        agent.reset(variant, variant.masked, 0, np.random.default_rng(0))
        observation = episode.observe()
        while (call := agent.act(observation)) is not None:
            observation = episode.step(call)
            agent.observed(call, observation)
            seen = agent.transcript
            assert seen.startswith("Request: " + variant.masked) and seen.endswith(agent.lines[-1])
            assert agent.scorer.count(seen) + agent.scorer.count("\n" + agent._frame) <= 160
    assert agent._dropped > 0


def test_choices_go_back_only_when_the_word_changes(tiny):
    """With a scorer that always prefers one word the order is that of the plan; with one that turns round at the message the steps are repeated."""
    variant = SUITE.variants[0]
    wrong = next(word for word in variant.options if word != variant.answer)
    experiment = ForcedInjection(OfficeOps(irreversible=0.0), budget=2)
    variant = experiment.suite.variants[0]

    class Reader(HFChoiceAgent):
        def choice(self):
            told = any(line.startswith("User:") and variant.answer in line for line in self.lines)
            scores = np.array([float(word == (variant.answer if told else wrong)) for word in variant.options])
            return Choice(variant.options, scores, scores, None, np.ones(len(scores)))

    agent = Reader(*tiny)
    never = experiment.episode(agent, variant, arm="never")
    assert [call for call, _ in never.trace] == [step.call for step in plan(variant, wrong)]
    run = experiment.episode(agent, variant, fraction=0.5)
    steps, at = plan(variant), run.message_at
    back = next(i for i, step in enumerate(steps) if step.fields)
    assert [call for call, _ in run.trace[at + 1 :]] == [step.call for step in steps[back:]] and run.row["passed"] and run.row["absorbed"] == 1


def test_a_model_that_does_not_listen_stays_wrong(tiny):
    """The skeleton hands the stated word to nobody: what was told has an effect only through the model's own choice."""
    variant = SUITE.variants[0]
    wrong = next(word for word in variant.options if word != variant.answer)

    class Deaf(HFChoiceAgent):
        def choice(self):
            scores = np.array([float(word == wrong) for word in variant.options])
            return Choice(variant.options, scores, scores, None, np.ones(len(scores)))

    experiment = ForcedInjection(SUITE, budget=2)
    for arm, fraction in (("inject", 0.1), ("inject", 0.5), ("oracle", 0.0)):
        run = experiment.episode(Deaf(*tiny), variant, arm=arm, fraction=fraction)
        calls = [call for call, _ in run.trace if call.name != "verify"]
        assert calls == [step.call for step in plan(variant, wrong)] and not run.row["passed"]
        assert run.row["absorbed"] == (0 if arm == "inject" else -1)


def test_recorded_language_model_answers_live_as_recorded():
    """Recorded in bfloat16, answered here in float32: the same choices, entropies within what rounding does to them."""
    data = nbkit.load_recording("clarify-smollm2").data
    recorded = Outcomes.from_arrays(data, "grid_")
    agent = HFChoiceAgent(*nbkit.load_model("smollm2-135m"), name="smollm2")
    experiment = ForcedInjection(SUITE, trials=3, sham=False)
    variant = SUITE.variants[5]
    for arm, fraction in (("never", math.nan), ("inject", 0.5)):
        row = experiment.row(agent, variant, arm=arm, fraction=0.5, trial=0)
        here = (recorded["variant"] == variant.id) & (recorded["arm"] == arm) & (recorded["trial"] == 0)
        here &= True if arm == "never" else np.isclose(recorded["fraction"], fraction)
        (at,) = np.flatnonzero(here)
        assert all(recorded[name][at] == row[name] for name in ("passed", "actions", "absorbed", "oracle_actions", "stopped"))
        mine = data["choice_row"] == at
        assert data["choice_at"][mine].tolist() == [acted for acted, _ in agent.choices]
        assert data["choice_option"][mine].tolist() == [choice.pick() for _, choice in agent.choices]
        np.testing.assert_allclose(data["choice_entropy"][mine], [choice.entropy() for _, choice in agent.choices], atol=0.15)


# ---- scripts ----


def test_words_are_read_from_their_own_sentence_only():
    for variant in SUITE.variants:
        assert read_value(variant, variant.full) == read_value(variant, variant.segment) == variant.answer
        assert read_value(variant, variant.masked) is None and read_value(variant, " ".join(variant.facts)) is None
        for word in variant.options:
            assert read_value(variant, with_word(variant, word).full) == word


def test_eager_repeats_the_dependent_steps_it_can_and_no_others():
    suite = OfficeOps(irreversible=0.5, reverify=2)
    experiment = ForcedInjection(suite, budget=3)
    for variant in suite.variants[::5]:
        agent = Eager()
        run = experiment.episode(agent, variant, fraction=0.7)
        steps, at = plan(variant), run.message_at
        redo = [s.call for s in steps[:at] if s.depends and s.undoable] if agent.history[0][1] != variant.answer else []
        calls = [call for call, _ in run.trace[at:]]
        assert [call.name for call in calls[:2]] == ["verify", "verify"]
        assert calls[2 : 2 + len(redo)] == redo and calls[2 + len(redo) :] == [s.call for s in steps[at:]]


def test_deferring_does_everything_else_first():
    for variant in SUITE.variants[::5]:
        run = ForcedInjection(SUITE).episode(Deferring(), variant, arm="never")
        depends = [next(s.depends for s in plan(variant, w) if s.call == call) for (call, _), w in zip(run.trace, _words(variant, run))]
        assert depends == sorted(depends)


def _words(variant, run):
    agent = Deferring()
    ForcedInjection(SUITE).episode(agent, variant, arm="never")
    return [word for _, word in agent.history]


def test_restart_starts_over_even_if_its_guess_was_right():
    experiment = ForcedInjection(OfficeOps(options=1, irreversible=0.0), budget=3)
    variant = experiment.suite.variants[0]
    run = experiment.episode(Restart(), variant, fraction=0.5)
    assert [call for call, _ in run.trace[run.message_at + 1 :]] == [step.call for step in plan(variant)]


def test_a_late_message_costs_verification_and_an_early_one_nothing():
    suite = OfficeOps(reverify=3)
    for agent in (Eager(), Deferring(), Restart(), LearnedPolicy.load()):
        late, early = (ForcedInjection(suite, budget=3).episode(agent, suite.variants[1], fraction=f) for f in (0.1, 0.0))
        assert late.marks.count("verify") == 3 and early.marks.count("verify") == 0


def test_every_agent_says_what_it_is(tiny):
    kinds = [agent.kind for agent in (Eager(), LearnedPolicy(), HFChoiceAgent(*tiny), OpenAICompatibleAgent("http://localhost:1/v1", "m"))]
    assert kinds == ["scripted simulation", "trained toy", "real model", "real model"]
    assert Restart().describe == "restart (scripted simulation)"
    with pytest.raises(InputError, match="name"):
        Eager("")


# ---- the learned policy ----


def test_demonstrations_hide_reveal_and_repeat():
    suite = OfficeOps(2, irreversible=0.0)
    views, steps, words = demonstrations(suite, n=200, masked=1.0, seed=3)
    assert views.shape[1] == FEATURES and len(views) == len(steps) == len(words) and (steps == STEPS).sum() == 200
    ends = np.flatnonzero(steps == STEPS)
    lengths = np.diff([-1, *ends])
    assert lengths.min() >= min(len(plan(v)) for v in suite.variants) + 1 and lengths.max() > max(len(plan(v)) for v in suite.variants) + 1
    straight = demonstrations(suite, n=8, masked=0.0)
    first = straight[1][: len(plan(suite.variants[0])) + 1].tolist()
    assert first == [*range(len(plan(suite.variants[0]))), STEPS]


def test_learning_needs_calls_and_no_dependencies(monkeypatch):
    """The same demonstrations come out when every step claims to depend on the word, or none does."""
    import nbkit.agents.protocol as protocol

    base = demonstrations(OfficeOps(2), n=16, seed=1)
    for claim in (True, False):
        monkeypatch.setattr(protocol, "plan", lambda v, w, claim=claim: [step._replace(depends=claim) for step in plan(v, w)])
        for a, b in zip(base, demonstrations(OfficeOps(2), n=16, seed=1)):
            np.testing.assert_array_equal(a, b)


def test_fit_is_repeatable_and_learns_a_small_suite():
    suite = OfficeOps(1, dims=("input",), options=2)
    fits = [LearnedPolicy(hidden=32, seed=4).fit(suite, sequences=200, updates=400, batch=128) for _ in range(2)]
    for a, b in zip(fits[0].network_.parameters(), fits[1].network_.parameters()):
        torch.testing.assert_close(a, b)
    assert ForcedInjection(suite, timings=(), sham=False).row(fits[0], suite.variants[0], arm="oracle")["passed"]


def test_trained_policy_does_every_job_it_is_told_fully():
    agent = LearnedPolicy.load()
    assert sum(w.size + b.size for w, b in agent._layers) < 100_000
    table = ForcedInjection(SUITE, timings=(), trials=1, sham=False, seed=5).run([agent])
    assert table.where(arm="oracle")["passed"].all() and table["stopped"].all()
    copy = pickle.loads(pickle.dumps(agent))
    assert copy.network_ is None
    again = ForcedInjection(SUITE, timings=(), trials=1, sham=False, seed=5).run([copy])
    np.testing.assert_array_equal(table["passed"], again["passed"])


def test_numpy_and_torch_give_the_same_logits():
    agent = LearnedPolicy.load()
    variant = SUITE.variants[3]
    agent.reset(variant, variant.masked, 0, np.random.default_rng(0))
    agent.act(None)
    with torch.inference_mode():
        agent._look()
        torch.testing.assert_close(agent.network_(torch.from_numpy(agent._view.x)), torch.from_numpy(agent._logits), rtol=1e-4, atol=1e-4)
    assert build_policy({"hidden": 128})[0].in_features == FEATURES


def test_learned_policy_refuses_what_it_cannot_do():
    with pytest.raises(InputError, match="no weights"):
        ForcedInjection(SUITE).row(LearnedPolicy(), SUITE.variants[0])
    with pytest.raises(InputError, match="masked"):
        demonstrations(SUITE, n=1, masked=2)


# ---- the endpoint ----


class _Server(http.server.ThreadingHTTPServer):
    """A chat endpoint on this machine; ``reply`` is called with the request's body and returns (status, headers, bytes)."""

    def __init__(self, reply):
        self.reply, self.seen = reply, []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __exit__(self, *exc):
        self.shutdown()
        super().__exit__(*exc)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        status, headers, content = self.server.reply(body)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def message(content="", call=None):
    calls = [] if call is None else [{"id": "c1", "type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.args))}}]
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": content, "tool_calls": calls}}]}).encode()


def test_endpoint_agent_does_a_job_by_tool_calls_and_hears_the_message():
    variant = SUITE.variants[1]
    wrong = next(word for word in variant.options if word != variant.answer)

    def reply(body):
        """A clerk who counts its tool calls and reads the user's messages."""
        made = [m for m in body["messages"] if m["role"] == "assistant"]
        word = variant.answer if any(m["role"] == "user" and variant.segment in m["content"] for m in body["messages"]) else wrong
        steps = plan(variant, word)
        return message("done") if len(made) == len(steps) else message(call=steps[len(made)].call)

    with _Server(reply) as server:
        agent = OpenAICompatibleAgent(server.url, "clerk", timeout=10)
        experiment = ForcedInjection(SUITE, budget=1.5)
        told = experiment.episode(agent, variant, arm="oracle")
        late = experiment.episode(agent, variant, fraction=0.1)
        messages = server.seen[-1][2]["messages"]
        never = experiment.episode(agent, variant, arm="never")
    assert told.row["passed"] and told.row["stopped"] and [call for call, _ in told.trace] == [step.call for step in plan(variant)]
    assert late.row["passed"] and late.row["delivered"] and late.trace[late.message_at][0].name == "verify"
    assert not never.row["passed"] and agent.name == "endpoint clerk"
    # The protocol: a tool's result follows the call at once, then what the user said.
    for before, after in zip(messages, messages[1:]):
        assert (before["role"] == "assistant") == (after["role"] == "tool")
    assert sum(variant.segment in m["content"] for m in messages) == 1
    results = [m["content"] for m in messages if m["role"] == "tool"]
    plain = [m["content"] for m in messages if m["role"] == "user"]
    calls = [(call, text) for call, text in late.trace[:-1] if call.name != "verify"]
    assert results[: len(calls)] == [text for _, text in calls] and plain[2] == f"verify(): {late.trace[late.message_at][1]}"
    assert server.seen[0][2]["temperature"] == 0 and variant.answer not in json.dumps(server.seen[0][2]["tools"])


def test_tools_are_described_without_their_values():
    variant = SUITE.variants[0]
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tool_schemas(variant, plan)}
    assert set(tools) == {step.call.name for step in plan(variant)}
    assert all(word not in json.dumps(tools) for word in variant.slots.values())


def test_key_comes_from_the_environment_and_stays_at_its_address(monkeypatch):
    monkeypatch.setenv("NBKIT_ENDPOINT_KEY", "secret")
    with _Server(lambda body: message("other")) as other, _Server(lambda body: (302, {"Location": other.url}, b"")) as first:
        with pytest.raises(RunError, match="302"):
            ChatEndpoint(first.url, "m").chat([])
        assert first.seen[0][1]["Authorization"] == "Bearer secret" and not other.seen
        monkeypatch.delenv("NBKIT_ENDPOINT_KEY")
        assert ChatEndpoint(other.url, "m").chat([{"role": "user", "content": "hi"}])["content"] == "other"
        assert "Authorization" not in other.seen[0][1]
    assert "secret" not in repr(ChatEndpoint("https://example.org/v1", "m"))


@pytest.mark.parametrize(
    "reply,message",
    [
        ((500, {}, b"out of memory"), "500: out of memory"),
        ((404, {}, b""), "404"),
        ((200, {}, b"<html>"), "choices"),
        ((200, {}, b'{"choices": []}'), "choices"),
        ((200, {}, b'{"choices": [{"message": "hi"}]}'), "object"),
    ],
)
def test_answers_that_are_none(reply, message):
    with _Server(lambda body: reply) as server, pytest.raises(RunError, match=message):
        ChatEndpoint(server.url, "m").chat([])


def test_an_endpoint_that_is_not_there_says_so():
    with _Server(lambda body: message()) as server:
        url = server.url
    server.server_close()
    with pytest.raises(RunError, match="no answer.*start the server"):
        ForcedInjection(SUITE).row(OpenAICompatibleAgent(url, "m", timeout=5), SUITE.variants[0])


def test_a_slow_endpoint_is_given_up():
    done = threading.Event()
    with _Server(lambda body: (done.wait(5), message())[1]) as server:
        with pytest.raises(RunError, match="no answer"):
            ChatEndpoint(server.url, "m", timeout=0.2).chat([])
        done.set()


def test_arguments_that_are_no_json_are_refused_by_the_office_not_by_a_crash():
    bad = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{path"}}
    content = json.dumps({"choices": [{"message": {"role": "assistant", "tool_calls": [bad]}}]}).encode()
    with _Server(lambda body: (200, {}, content)) as server:
        run = ForcedInjection(SUITE).episode(OpenAICompatibleAgent(server.url, "m"), SUITE.variants[0], arm="never")
    assert not run.row["stopped"] and run.row["actions"] == run.row["budget"] and all("refused" in text for _, text in run.trace)


@pytest.mark.parametrize(
    "url", ["http://example.org/v1", "ftp://localhost/v1", "file:///etc/passwd", "https://me:pw@host/v1", "https://h/v1?key=1", "", None],
)
def test_addresses_that_are_refused(url):
    with pytest.raises(InputError, match="base_url") as error:
        ChatEndpoint(url, "m")
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("options", [{"model": ""}, {"model": "m", "timeout": 0}])
def test_settings_that_are_refused(options):
    with pytest.raises(InputError):
        ChatEndpoint("http://127.0.0.1:1", **options)
