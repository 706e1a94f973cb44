"""Measurements of trained drafters on text of their target, and the rules by which they are judged.

Material (`Material`): text that the target sampled at temperature 0.7 (looping text would make late steps trivially easy), and from several
chain starts in it the target's own greedy continuation with its true features. A chain is fed with that continuation, so every drafter is
measured on the same tokens, and the chain's proposals are accepted under greedy verification exactly as far as they agree with it.

Recordings (``data/recordings/drift-grid``, ``drift-smollm2``) are dicts of arrays. C cells, P prompts, K steps (column k - 1 is step k), H heads.
Values are means over the chain starts of a prompt, so prompts are the units to resample; the cells of all seeds see the same prompts.

    variant, ttt, seed             (C,) the cell; drift-smollm2 has "pre" and "post"
    accepted                       (C, P, K) a_k: share of starts whose first k proposals are all the target's; tau without bonus is the sum over k
    teacher_accuracy               (C, P, K) share of starts in the sampled text, fed with that text, whose step k proposes the target's best token:
                                   conditional acceptance without the selection of starts that survive to k
    rms, rms_out, cos, update, key_cos, sink, recent, recent_text, chain, prompt, entropy      (C, P, K) see `Chain`
    control_rms, control_cos, control_key_cos, control_sink, control_recent, control_chain, control_prompt, control_entropy
                                   (C, P, K) the same tokens with true features instead of a chain; drift is measure minus control
    own_rms, own_cos, own_sink, own_recent, own_chain, own_entropy      (C, P, K) chains that read their own proposals; no control
    fused_rms (C, P), fused_parts (C, P, 3): magnitude of g and of the three streams' parts of it; stream_rms (P, 3): of the target's streams
    alphas (A,), noise_hidden, noise_embedding      (C, A, P, K) a_k under noise; noise in units of the layer's update is alpha / update
    pin_accepted, pin_rms, pin_cos, pin_sink, pin_recent      (C, P, K) every fed-back state at the magnitude of g
    scaled_accepted                (C, P, K) the highest stream of the target times 10, in text and chain
    target_sink, target_sink_share (layers, heads) and drafter_sink, drafter_sink_share (C, H): the key with the largest mean attention, and the mean
                                   attention on it from queries behind it; key s of a drafter is the pair that carries the target's features of s
    windows (W,) str; long_length (P_long,), long_accepted (W, C, P_long, K): prompts longer than the drafter's training text. "full" attention,
                                   "window" of 256 keys, "window+sink" with the first 4 positions besides
    spec_equal (C, n) whether greedy speculative decoding gave the target's greedy tokens; spec_accepted (C, n) mean accepted drafts a round,
                                   without bonus; spec_tokens_per_pass (C, n)
    NaN where a measurement does not apply to a cell (an MTP head has no streams) or was not made in it (see the card's ``made``).
    drift-smollm2 only: templates (4,) str, template_accepted (4, C, P_t, K); spec_seconds (C, n) and plain_seconds (n,).

Rules, fixed before any trained drafter was measured. An interval is a 95 % bootstrap: seeds as outer level, prompts within them (drift-grid), or
prompts (drift-smollm2). "At TTT 2" and so on names the cells of drift-grid (A); B is drift-smollm2, where the drafters have TTT 4 and one seed.

    C1  B, pre: slope over k of sink - control_sink < 0 and of recent - control_recent > 0, k = 1..8, both intervals without 0: reproduced. One of
        them: partly. A is reported beside it; where sink at k = 1 is below 0.05 in A the tiny drafters have no sink and only recent counts.
    C2  A, mtp: jump = step 2 minus step 1 of measure - control (step 1 reads the target's state). Sink jump < 0 and recent jump > 0, both without 0:
        reproduced, if also |slope of steps 2..8| < |jump| / 4 in both; without the flat part: partly.
    C3  A, pre, each TTT: slope of log rms over k = 1..16 with interval > 0 in at least 4 of 5 seeds; B likewise with k = 1..8, one seed.
    C4  identities (scaled stream leaves fc_norm's g alone) are tests. Here: tau(scaled) / tau(clean) of fc_norm minus that of pre > 0 at TTT 2.
        Unbalanced: the highest stream has the largest part of g in B, mean over prompts, and its share of the parts' sum is above 1/2.
    C5  A: teacher_accuracy of post minus pre, mean over steps TTT+1..TTT+4, interval > 0. Verdict at TTT 2; TTT 1, 4 and 8 are shown beside it.
    C6  post: |slope of log rms| < 0.01 a step, interval within, all TTT of A above 1 and B; and B: |slope of recent - control_recent| of post below
        that of pre, interval of the difference without 0. Only the first: partly.
    C7  A, gate at TTT 2: slope of log rms > 0 (interval) although sink at k = 1 is below that of pre (interval): reproduced; growth alone: partly.
        Entropy of gate+post at k = 8 is reported; no collapse (below 0.7 nats) is "not reproduced" for that half.
    C8  kept share tau(alpha) / tau(0), area over alpha in [0, 1] (trapezoid, 1 at alpha 0), hidden path, post minus pre, interval > 0. A at TTT 2 and
        4 and B, each with its own verdict. Embedding path reported.
    C9  tau(pin) / tau - 1 < 0 in pre and post, and lower in pre than in post (interval of the difference). B; A at TTT 2 and 4 beside it. Only the
        losses: partly.
    C10 B: (tau neither / tau trained) of post over the same of pre > 1, interval; the other two templates beside it. tau without bonus.
    C11 B: tau(window+sink) > tau(full) in pre and tau(full) of post > pre, both intervals without 0: reproduced; one of them: partly. Both prompt
        lengths together, shown apart as well. A has a target trained on 256 tokens itself, so its long prompts are a side note.
    C12 B: tau of post over pre, interval: above 1 a gain, within 0.97..1.03 a tie, else undecided or a loss.
    C13 A: tau of post at TTT 4 over TTT 8, lower end of the interval > 0.97: a shorter TTT suffices.
    C14 B: share of the drafter's heads whose sink is the most frequent sink position of the target's heads: above 1/2 in pre and post.
"""
