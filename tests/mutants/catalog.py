"""Which implementations the target engine must reject or accept, as data.

`WRONG` and `RIGHT` name functions of `tests/mutants/wrong` and `tests/mutants/right`; what is
wrong with one is the first line of its docstring.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

PPO = {"mask": "ppo-clip"}
BINARY_TV = {"mask": "dppo-binary-tv"}
BINARY_KL = {"mask": "dppo-binary-kl"}
TOPK_KL = {"mask": "dppo-topk-kl"}
TOPK_TV = {"mask": "dppo-topk-tv"}
EXACT = {"mask": "predictive-kl", "tail": "exact"}
AGGREGATED = {"mask": "predictive-kl", "tail": "aggregated"}
UNIFORM = {"mask": "predictive-kl", "tail": "uniform"}
UNIFORM_FIVE = {**UNIFORM, "top_k": 5}
BRACKET = {"mask": "predictive-kl", "tail": "bracket"}
REPLACE = {"mask": "predictive-kl", "tail": "aggregated", "support": "replace"}
REVERSE = {"mask": "predictive-reverse-kl", "tail": "exact"}
TV = {"mask": "predictive-tv", "tail": "exact"}
SECOND = {"mask": "predictive-kl-second-order", "tail": "exact"}
FULL_KL = {"mask": "predictive-kl", "view": "full"}
FULL_REVERSE = {"mask": "predictive-reverse-kl", "view": "full"}
FULL_TV = {"mask": "predictive-tv", "view": "full"}
FULL_JS = {"mask": "predictive-jensen-shannon", "view": "full"}
FULL_HELLINGER = {"mask": "predictive-squared-hellinger", "view": "full"}
FULL_CHI2 = {"mask": "predictive-chi2", "view": "full"}
NONE = {"mask": "none"}
TOKEN_MEAN = {"mask": "none", "aggregation": "token-mean"}
SEQUENCE_MEAN = {"mask": "none", "aggregation": "sequence-mean"}
FIXED_LENGTH = {"mask": "none", "aggregation": "fixed-length"}
TV_TOKEN_MEAN = {"mask": "dppo-binary-tv", "aggregation": "token-mean"}

DECISIONS = ("mask.decisions",)


@dataclass(frozen=True)
class Subject:
    """An implementation to be judged.

    Attributes:
        place: `module:function` below `tests.mutants.wrong` or `tests.mutants.right`.
        options: how it is judged, by the names of `pdverify.conformance.options.Options`.
    """

    place: str
    options: dict[str, Any]

    @property
    def room(self) -> str:
        """The package it lives in."""
        return type(self).__name__.lower()

    @property
    def name(self) -> str:
        """`module/function`, with hyphens."""
        return self.place.replace(":", "/").replace("_", "-")

    @property
    def target(self) -> str:
        """As on the command line."""
        return f"tests.mutants.{self.room}.{self.place}"

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, function = self.target.split(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found

    @property
    def summary(self) -> str:
        """The function's docstring: what is wrong with it, or its style."""
        return " ".join((inspect.getdoc(self.load()) or "").split())


@dataclass(frozen=True)
class Wrong(Subject):
    """One that must be rejected.

    Attributes:
        source: where the bug comes from: seen in the field, or how one gets there.
        killed_by: checks that must be among those failing.
        only: the one check that fails, where no other may.
    """

    source: str
    killed_by: tuple[str, ...]
    only: str | None = None


@dataclass(frozen=True)
class Right(Subject):
    """One that must be accepted."""


AnySubject = TypeVar("AnySubject", bound=Subject)


def _only(place: str, options: dict[str, Any], check: str, source: str) -> Wrong:
    return Wrong(place, options, source, (check,), check)


def _wrong(
    place: str, options: dict[str, Any], source: str, killed_by: tuple[str, ...] = DECISIONS
) -> Wrong:
    return Wrong(place, options, source, killed_by)


_PPO = [
    _wrong("ppo_clip:both_sides_whatever_the_sign", PPO, "ratio filters that ignore the sign"),
    _only("ppo_clip:drops_at_the_bound", PPO, "mask.equality", "open and closed intervals mix"),
    _wrong("ppo_clip:bounds_swapped", PPO, "two bounds passed by position", ("mask.decisions",)),
    _wrong(
        "ppo_clip:one_clip_for_both",
        PPO,
        "clip-higher added to a symmetric clip",
        ("mask.decisions",),
    ),
    _wrong("ppo_clip:inverse_ratio", PPO, "bounds compared with mu / pi, as one filter does"),
    _wrong(
        "ppo_clip:bound_on_the_log_ratio",
        PPO,
        "log(1 + x) taken for x",
        ("mask.boundary",),
    ),
    _wrong("ppo_clip:reciprocal_lower_bound", PPO, "bounds symmetric in log space"),
    _wrong("ppo_clip:difference_for_ratio", PPO, "the binary mask's quantity under PPO's name"),
    _wrong("ppo_clip:negative_side_forgotten", PPO, "clip metrics that count A > 0 only"),
    _only(
        "ppo_clip:zero_advantage_as_negative",
        PPO,
        "mask.zero-advantage",
        "one where() for both signs, common in trainers",
    ),
    _wrong("ppo_clip:ratio_of_the_sequence", PPO, "sequence-level ratios under the token's name"),
    _wrong(
        "ppo_clip:ratio_in_bf16", PPO, "a working dtype that reaches the mask", ("mask.boundary",)
    ),
    _wrong("ppo_clip:policy_against_itself", PPO, "old log-probs recomputed by the trainer"),
    _wrong("ppo_clip:shifted_by_one", PPO, "log-probs read one slot late"),
    _wrong("ppo_clip:clip_after_weighting", PPO, "clip and advantage applied in the wrong order"),
]

_BINARY = [
    _wrong("binary:tv_symmetric", BINARY_TV, "a symmetric mask in a released trainer"),
    _wrong("binary:tv_both_cells_summed", BINARY_TV, "L1 distance called total variation"),
    _wrong("binary:tv_half_of_one_cell", BINARY_TV, "the half applied after one cell was left out"),
    _wrong("binary:tv_from_the_ratio", BINARY_TV, "|r - 1| called TV, seen in a trainer"),
    _only("binary:tv_drops_at_the_threshold", BINARY_TV, "mask.equality", "keep on < for <="),
    _wrong("binary:tv_in_bf16", BINARY_TV, "no upcast before exp(lp) - exp(lm), common"),
    _wrong("binary:tv_rounded_to_decimals", BINARY_TV, "a logged metric used for the decision"),
    _wrong("binary:tv_of_log_probs", BINARY_TV, "exp forgotten"),
    _wrong("binary:tv_one_sided", BINARY_TV, "one-sided masks of distillation losses"),
    _only(
        "binary:tv_zero_advantage_as_negative",
        BINARY_TV,
        "mask.zero-advantage",
        "one where() for both signs, common in trainers",
    ),
    _only(
        "binary:tv_thresholds_swapped",
        BINARY_TV,
        "mask.thresholds",
        "two thresholds passed by position",
    ),
    _wrong("binary:kl_reversed", BINARY_KL, "arguments of KL in the other order"),
    _wrong("binary:kl_without_the_rest", BINARY_KL, "the one-sample log-ratio with its weight"),
    _wrong(
        "binary:kl_large_epsilon",
        BINARY_KL,
        "an epsilon in the logs, as trainers have (smaller)",
        ("value.divergence",),
    ),
    _wrong("binary:kl_clamped_probabilities", BINARY_KL, "probabilities clamped, as one does"),
    _wrong("binary:kl_nan_near_one", BINARY_KL, "1 - 1e-7 rounds to 1 in bfloat16"),
    _wrong("binary:kl_one_sample_k3", BINARY_KL, "the k3 estimator for the divergence"),
    _wrong("binary:kl_one_sample_k2", BINARY_KL, "the k2 estimator for the divergence"),
    _wrong("binary:kl_in_bits", BINARY_KL, "another unit than the threshold's"),
    _wrong("binary:kl_as_a_distance", BINARY_KL, "one threshold for TV and KL"),
    _wrong("binary:kl_direction_reversed", BINARY_KL, "log(mu / pi) where log(pi / mu) belongs"),
    _wrong(
        "binary:kl_one_threshold",
        BINARY_KL,
        "a second threshold added later",
        ("mask.thresholds",),
    ),
]

_TOPK = [
    _wrong("dppo_topk:no_tail_cell", TOPK_KL, "the tail term forgotten; clamped to hide it"),
    _wrong("dppo_topk:renormalized_on_the_support", TOPK_KL, "top-K log-probs renormalized"),
    _wrong("dppo_topk:reversed_arguments", TOPK_KL, "arguments of KL in the other order"),
    _wrong("dppo_topk:tv_without_the_half", TOPK_TV, "L1 distance called total variation"),
    _wrong("dppo_topk:tv_without_the_tail", TOPK_TV, "the tail cell forgotten"),
    _wrong("dppo_topk:tv_tail_token_by_token", TOPK_TV, "mu taken as 0 outside its list"),
    _wrong(
        "dppo_topk:sampled_token_left_in_the_tail",
        TOPK_KL,
        "K slots, common in trainers",
        ("size.k-one",),
    ),
    _wrong("dppo_topk:sampled_token_counted_twice", TOPK_TV, "a token listed twice"),
    _wrong("dppo_topk:predictive_direction", TOPK_KL, "the other paper's direction"),
    _wrong("dppo_topk:direction_of_the_likeliest_token", TOPK_KL, "argmax taken for the sample"),
    _wrong("dppo_topk:sampled_token_assumed_first", TOPK_KL, "engines that put it first"),
    _wrong("dppo_topk:sampled_token_assumed_last", TOPK_TV, "engines that append it"),
    _wrong("dppo_topk:one_list_late", TOPK_KL, "lists shifted by one position"),
    _wrong("dppo_topk:own_list_of_the_trainer", TOPK_TV, "two top-K lists compared by rank"),
    _wrong("dppo_topk:masses_in_bf16", TOPK_KL, "a support kept in bfloat16"),
    _wrong("dppo_topk:mean_over_the_support", TOPK_KL, "reduction = mean"),
    _only("dppo_topk:tv_drops_at_the_threshold", TOPK_TV, "mask.equality", "keep on < for <="),
    _wrong("dppo_topk:divergence_of_the_sequence", TOPK_KL, "sequence-level divergences"),
]

_PREDICTIVE = [
    _wrong("predictive_topk:ratio_direction", EXACT, "the ratio's direction, as DPPO has"),
    _wrong("predictive_topk:sign_of_the_global_term", EXACT, "a slip in the derivation"),
    _wrong("predictive_topk:global_term_not_weighted", EXACT, "a slip in the derivation"),
    _wrong("predictive_topk:global_term_weighted_by_behavior", EXACT, "a slip in the derivation"),
    _wrong("predictive_topk:local_term_weighted", EXACT, "a slip in the derivation"),
    _wrong("predictive_topk:tail_stands_still", EXACT, "the tail seen as a constant"),
    _wrong("predictive_topk:aggregated_for_exact", EXACT, "one tail under another's name"),
    _wrong(
        "predictive_topk:uniform_for_exact",
        EXACT,
        "one tail under another's name",
        ("tail.motion",),
    ),
    _wrong("predictive_topk:exact_for_aggregated", AGGREGATED, "one tail under another's name"),
    _wrong("predictive_topk:aggregated_not_squared", AGGREGATED, "a factor pi_T lost"),
    _wrong(
        "predictive_topk:uniform_over_the_vocabulary",
        UNIFORM,
        "V for V - |S|",
        ("value.coefficient",),
    ),
    _wrong(
        "predictive_topk:uniform_by_the_slots", UNIFORM, "K + 1 for |S|", ("value.coefficient",)
    ),
    _only("predictive_topk:uniform_over_five_at_least", UNIFORM_FIVE, "tail.count", "a bound"),
    _wrong("predictive_topk:uniform_without_the_list", UNIFORM, "V - K", ("tail.count",)),
    _wrong(
        "predictive_topk:uniform_by_finite_columns",
        UNIFORM,
        "padded vocabularies",
        ("vocabulary.neg-inf",),
    ),
    _wrong("predictive_topk:bracket_drops_when_either_end_does", BRACKET, "or for and"),
    _wrong("predictive_topk:bracket_by_its_middle", BRACKET, "an average of two signs"),
    _wrong("predictive_topk:bracket_one_end_only", BRACKET, "half of it implemented"),
    _wrong("predictive_topk:bracket_with_a_lower_end_of_zero", BRACKET, "0 as a lower bound"),
    _wrong("predictive_topk:tail_by_the_sampled_token", AGGREGATED, "K slots and a local term"),
    _wrong("predictive_topk:bracket_agreement_is_enough", BRACKET, "certainty taken for sign"),
    _wrong("predictive_topk:behavior_tail_taken_as_empty", AGGREGATED, "mu is 0 off its list"),
    _wrong("predictive_topk:training_side_renormalized", AGGREGATED, "softmax over the list"),
    _wrong("predictive_topk:advantage_ignored", EXACT, "the sign of C alone"),
    _wrong("predictive_topk:proximity_ignored", EXACT, "one criterion forgotten"),
    _wrong("predictive_topk:direction_ignored", EXACT, "one criterion forgotten"),
    _wrong("predictive_topk:proximity_or_direction", EXACT, "or for and"),
    _wrong("predictive_topk:mask_inverted", EXACT, "a drop mask returned as a keep mask"),
    _wrong("predictive_topk:proximity_by_another_divergence", EXACT, "two divergences mixed"),
    _wrong("predictive_topk:direction_by_another_divergence", EXACT, "two divergences mixed"),
    _wrong(
        "predictive_topk:coefficient_with_the_ratio",
        EXACT,
        "the predicted change returned for C",
        ("value.coefficient",),
    ),
    _wrong(
        "predictive_topk:coefficient_with_the_advantage",
        EXACT,
        "A C returned for C",
        ("value.coefficient",),
    ),
    _wrong(
        "predictive_topk:divergence_clamped_for_logging",
        EXACT,
        "a clamped metric",
        ("value.divergence",),
    ),
    _wrong("predictive_topk:one_temperature_only", EXACT, "temperature on one side"),
    _wrong("predictive_topk:last_listed_token_lost", EXACT, "off by one in the list"),
    _wrong(
        "predictive_topk:twenty_slots_at_most",
        EXACT,
        "the paper's K as a constant",
        ("size.k-most",),
    ),
    _wrong("predictive_topk:reverse_kl_without_the_mean", REVERSE, "gbar forgotten"),
    _wrong("predictive_topk:reverse_kl_by_the_forward_one", REVERSE, "the usual KL instead"),
    _wrong("predictive_topk:tv_direction_without_the_tail", TV, "the tail cell forgotten"),
    _wrong("predictive_topk:tv_sign_of_the_log_ratio_only", TV, "an unweighted mean"),
]

_FULL = [
    _wrong("predictive_full:kl_of_the_best_tokens", FULL_KL, "top-K under the full view's name"),
    _wrong("predictive_full:kl_mean_over_the_vocabulary", FULL_KL, "reduction = mean"),
    _wrong("predictive_full:kl_swapped", FULL_KL, "arguments in the other order"),
    _wrong("predictive_full:kl_epsilon_in_the_logs", FULL_KL, "an epsilon in every log"),
    _wrong("predictive_full:kl_in_bf16", FULL_KL, "a working dtype that reaches the softmax"),
    _wrong("predictive_full:kl_one_sample", FULL_KL, "one sample for the expectation"),
    _wrong("predictive_full:kl_step_moves_one_logit", FULL_KL, "the step e_k"),
    _wrong("predictive_full:kl_step_from_the_behavior_policy", FULL_KL, "the step e_k - mu"),
    _wrong("predictive_full:kl_descent_for_ascent", FULL_KL, "the sign of the loss"),
    _wrong("predictive_full:kl_softmax_over_positions", FULL_KL, "the wrong axis"),
    _wrong("predictive_full:kl_across_the_batch", FULL_KL, "a batch statistic for a token's"),
    _wrong("predictive_full:reverse_kl_without_the_mean", FULL_REVERSE, "gbar forgotten"),
    _wrong("predictive_full:reverse_kl_without_the_others", FULL_REVERSE, "local term alone"),
    _wrong("predictive_full:tv_sum_of_differences", FULL_TV, "L1 distance called TV"),
    _wrong("predictive_full:tv_largest_difference", FULL_TV, "the wrong norm"),
    _wrong("predictive_full:jensen_shannon_mixture_forgotten", FULL_JS, "Jeffreys for JS"),
    _wrong("predictive_full:jensen_shannon_direction_to_behavior", FULL_JS, "the wrong slope"),
    _wrong("predictive_full:jensen_shannon_in_bits", FULL_JS, "another unit"),
    _wrong("predictive_full:hellinger_not_squared", FULL_HELLINGER, "the root taken"),
    _wrong("predictive_full:hellinger_without_the_half", FULL_HELLINGER, "another normalization"),
    _wrong("predictive_full:chi2_other_denominator", FULL_CHI2, "arguments in the other order"),
    _wrong("predictive_full:chi2_direction_of_kl", FULL_CHI2, "two divergences mixed"),
]

_SECOND = [
    _wrong("second_order:curvature_missing", SECOND, "first order only"),
    _wrong("second_order:curvature_without_the_half", SECOND, "a Taylor factor lost"),
    _wrong("second_order:curvature_subtracted", SECOND, "a sign lost"),
    _only(
        "narrow:coefficient_in_float32",
        {**FULL_KL, "precision": "fp64"},
        "mask.near-zero",
        "one quantity upcast, the other not",
    ),
    _wrong(
        "second_order:curvature_of_the_full_divergence",
        SECOND,
        "the other view's curvature",
        ("mask.boundary",),
    ),
    _wrong("second_order:curvature_of_the_score", SECOND, "another step"),
    _only("second_order:step_size_ignored", SECOND, "mask.step-size", "a parameter never read"),
    _wrong("second_order:ratio_missing_from_the_step", SECOND, "on-policy habits"),
    _wrong("second_order:sign_of_the_advantage_as_step", SECOND, "enough for first order only"),
    _wrong("second_order:direction_not_asked", SECOND, "one criterion forgotten"),
    _wrong("second_order:only_if_outside_already", SECOND, "the plain mask's habit"),
    _wrong("second_order:ratio_capped_in_the_step", SECOND, "the loss's clip in the step"),
]

_VALUE, _GRADIENT, _AGGREGATION = ("loss.value",), ("loss.gradient",), ("loss.aggregation",)
_LOSS = [
    _wrong("loss:surrogate", NONE, "the ratio form, a documented convention", _VALUE),
    _wrong("loss:ratio_not_detached", NONE, "detach forgotten; some do so", _GRADIENT),
    _wrong("loss:sign_flipped", NONE, "objective for loss", _VALUE),
    _wrong("loss:ratio_missing", NONE, "on-policy habits", _VALUE),
    _wrong("loss:ratio_inverted", NONE, "mu / pi for pi / mu", _VALUE),
    _wrong("loss:cap_ignored", NONE, "no truncation, though documented", ("loss.cap",)),
    _only("loss:cap_of_twenty", NONE, "loss.cap", "a default that hides the parameter"),
    _wrong("loss:cap_on_the_weighted_ratio", NONE, "order of cap and advantage", ("loss.cap",)),
    _wrong("loss:cap_two_sided", NONE, "a two-sided clip of the weight", ("loss.small-ratio",)),
    _only(
        "loss:log_ratio_clamped_both_ways",
        NONE,
        "loss.small-ratio",
        "a clamp against overflow, applied to both ends; common",
    ),
    _wrong("loss:over_the_cap_dropped", NONE, "infinite weights replaced by 0", ("loss.cap",)),
    _wrong("loss:normalizer_detached", NONE, "a gradient lost in a custom backward", _GRADIENT),
    _wrong("loss:gradient_only_through_a_constant", NONE, "x - sg(x)", _VALUE),
    _only("loss:centered_near_the_behavior_policy", NONE, "loss.value", "-A (r - 1) near r = 1"),
    _only(
        "loss:ratio_differentiated_inside_its_clip",
        NONE,
        "loss.gradient",
        "a clip that alone stops the gradient",
    ),
    _wrong(
        "loss:log_probs_clamped", NONE, "log-probs clamped for stability", ("loss.small-ratio",)
    ),
    _wrong("loss:loss_in_bf16", NONE, "a working dtype that reaches the loss", _VALUE),
    _wrong("loss:temperature_in_the_loss", NONE, "temperature on one side", _VALUE),
    _wrong("loss:advantages_normalized", NONE, "whitened twice", _VALUE),
    _wrong("loss:dropped_tokens_contribute", BINARY_TV, "mask not used", ("loss.dropped",)),
    _only("loss:dropped_tokens_leak", BINARY_TV, "loss.dropped", "a soft mask"),
    _wrong(
        "loss:dropped_by_multiplication",
        BINARY_TV,
        "sum(x * mask) with NaN in the padding",
        ("loss.padding",),
    ),
    _wrong("loss:kept_tokens_dropped", BINARY_TV, "an inverted mask", ("loss.dropped",)),
    _wrong(
        "loss:dropped_value_stays",
        BINARY_TV,
        "gradient stopped, value left in",
        ("loss.dropped",),
    ),
    _only("loss:mask_before_the_cap", BINARY_TV, "loss.overflow", "inf * 0"),
    _only("loss:padding_multiplied_by_zero", NONE, "loss.padding", "NaN * 0"),
    _wrong(
        "loss:penalty_switched_off_by_zero",
        NONE,
        "a coefficient of 0 times inf",
        ("loss.small-ratio",),
    ),
    _wrong("loss:ratio_of_probabilities", NONE, "probabilities that underflow", ("loss.overflow",)),
    _wrong("loss:token_mean_with_padding", TOKEN_MEAN, "mean() of the batch", _AGGREGATION),
    _wrong(
        "loss:token_mean_of_the_kept",
        TV_TOKEN_MEAN,
        "the number of unmasked tokens as denominator",
        _AGGREGATION,
    ),
    _wrong(
        "loss:sequence_mean_with_empty_sequences",
        SEQUENCE_MEAN,
        "all-padding sequences",
        _AGGREGATION,
    ),
    _only(
        "loss:sequence_mean_is_a_token_mean",
        SEQUENCE_MEAN,
        "loss.aggregation",
        "one aggregation under another's name",
    ),
    _wrong(
        "loss:fixed_length_by_the_longest", FIXED_LENGTH, "a length from the batch", _AGGREGATION
    ),
    _wrong(
        "loss:padding_poisons_the_mean",
        TOKEN_MEAN,
        "sum(x * mask) with NaN in the padding",
        ("loss.padding",),
    ),
]

_NARROW = [
    _wrong("narrow:mask_as_numbers", EXACT, "float masks, common in trainers", ("output.form",)),
    _only("narrow:layout_guessed", EXACT, "output.form", "[L, B] and [B, L] told apart by size"),
    _only("narrow:rows_without_a_favorite_kept", EXACT, "mask.decisions", "a fallback"),
    _only("narrow:same_masses_in_another_order", EXACT, "mask.direction", "sorted lists compared"),
    _only("narrow:slack_at_the_threshold", EXACT, "mask.boundary", "slack for safety"),
    _only("narrow:small_advantages_as_zero", EXACT, "mask.advantage-scale", "a dead band"),
    _only(
        "narrow:advantage_times_coefficient_in_half",
        EXACT,
        "mask.advantage-scale",
        "products that underflow",
    ),
    _only("narrow:no_contrast_no_mask", EXACT, "mask.advantage-sign", "groups without contrast"),
    _only("narrow:zero_advantage_as_negative", EXACT, "mask.zero-advantage", "one where()"),
    _only("narrow:thresholds_swapped", EXACT, "mask.thresholds", "arguments by position"),
    _only("narrow:zero_threshold_as_default", EXACT, "mask.extreme-thresholds", "delta or 0.15"),
    _wrong("narrow:threshold_of_the_paper", EXACT, "a constant", ("mask.boundary",)),
    _only("narrow:log_ratios_clamped_for_logging", EXACT, "value.divergence", "a clamped metric"),
    _only("narrow:coefficient_over_a_long_way", EXACT, "value.coefficient", "a weight left in"),
    _only("narrow:coefficient_over_the_spread", EXACT, "value.near-equal", "0 / 0"),
    _only(
        "narrow:flat_tail_as_one_token",
        EXACT,
        "tail.motion",
        "a shortcut for flat tails",
    ),
    _only(
        "narrow:training_log_probs_floored",
        EXACT,
        "mask.small-mass",
        "log-probs clamped to a range, as one trainer does at -30",
    ),
    _only("narrow:tail_log_floored", EXACT, "tail.mass", "the tail's mass clamped, common"),
    _wrong(
        "narrow:tail_log_floored_in_float64",
        {**EXACT, "precision": "fp64"},
        "the tail's mass clamped, common",
        ("tail.mass",),
    ),
    _only("narrow:list_cut_at_the_last_entry", EXACT, "support.order", "best first assumed"),
    _only("narrow:list_searched_by_bisection", EXACT, "support.order", "best first assumed"),
    _wrong("narrow:sampled_token_outside_the_list", EXACT, "K slots, common"),
    _only(
        "narrow:sampled_tokens_missing_from_every_list",
        EXACT,
        "support.outside",
        "one decision for the whole batch",
    ),
    _wrong("narrow:sampled_token_in_any_list", EXACT, "isin() over all rows"),
    _wrong("narrow:sampled_token_inside_the_list", EXACT, "a token twice"),
    _only(
        "narrow:sampled_tokens_in_every_list",
        EXACT,
        "support.inside",
        "one decision for the whole batch",
    ),
    _wrong(
        "narrow:last_entry_replaced_by_the_sampled_token",
        EXACT,
        "the other support convention, common",
    ),
    _wrong(
        "narrow:sampled_token_searched_one_entry_short", EXACT, "off by one", ("value.divergence",)
    ),
    _only(
        "narrow:last_places_searched_for_the_batch",
        EXACT,
        "support.last",
        "one decision for the whole batch, off by one",
    ),
    _wrong(
        "narrow:unused_slots_multiplied_by_zero",
        EXACT,
        "inf * 0, NaN * 0",
        ("support.unused-slot",),
    ),
    _only(
        "narrow:last_slot_multiplied_where_nobody_needs_it",
        EXACT,
        "support.unused-slot",
        "NaN * 0 on a fast path",
    ),
    _wrong("narrow:unused_slots_read", EXACT, "a mask not read"),
    _only("narrow:zero_mass_slots_as_cells", EXACT, "support.neg-inf", "0 * -inf, then kept"),
    _only("narrow:one_entry_means_binary", EXACT, "size.k-one", "logprobs = True means K = 1"),
    _only("narrow:long_list_means_everything", EXACT, "size.k-most", "a special case too wide"),
    _only("narrow:needs_sixteen_tokens", EXACT, "size.tiny-vocabulary", "a metric that fails"),
    _only("narrow:ids_in_sixteen_bits", EXACT, "size.large-vocabulary", "offsets that wrap"),
    _only("narrow:ids_in_half_precision", EXACT, "size.large-vocabulary", "ids as floats"),
    _only("narrow:one_token_as_a_scalar", EXACT, "size.single", "squeeze()"),
    _only("narrow:one_position_transposed", EXACT, "size.odd", "squeeze()"),
    _wrong("narrow:columns_in_blocks_of_eight", EXACT, "a block that is not full"),
    _only("narrow:softmax_not_shifted", EXACT, "vocabulary.shift", "exp of raw logits"),
    _wrong("narrow:last_id_is_the_end", EXACT, "a special id"),
    _wrong("narrow:id_zero_is_padding", EXACT, "a special id", ("mask.direction",)),
    _only("narrow:one_token_in_every_place", EXACT, "vocabulary.permutation", "a special id"),
    _wrong("narrow:neg_inf_as_zero", EXACT, "phantom columns", ("support.neg-inf",)),
    _only("narrow:few_neg_inf_columns_revived", EXACT, "vocabulary.neg-inf", "phantom columns"),
    _wrong("narrow:order_applied_twice", EXACT, "sorting by length"),
    _only(
        "narrow:first_sequence_taken_for_the_longest", EXACT, "batch.order", "lengths from row 0"
    ),
    _wrong(
        "narrow:one_sequence_at_a_time_has_no_mask",
        EXACT,
        "evaluation told by size",
        ("batch.split",),
    ),
    _only("narrow:mostly_empty_batches_skipped", EXACT, "batch.split", "a batch statistic"),
    _only("narrow:scaled_by_the_batch", EXACT, "batch.padding", "a mean over padding"),
    _only("narrow:memory_read_as_contiguous", EXACT, "input.strides", "kernels without strides"),
    _only("narrow:logits_shifted_in_place", EXACT, "input.unmodified", "sub_() on the input"),
    _only("narrow:advantages_sign_in_place", EXACT, "input.unmodified", "sign_() on the input"),
    _only("narrow:kept_on_a_second_look", EXACT, "input.determinism", "state between calls"),
    _wrong("narrow:noise_on_the_threshold", EXACT, "random numbers", ("input.determinism",)),
    _only("narrow:bf16_logits_not_upcast", EXACT, "input.bf16", "no upcast"),
    _only("narrow:fp16_logits_not_upcast", EXACT, "input.fp16", "no upcast"),
]

WRONG: list[Wrong] = [
    *_PPO,
    *_BINARY,
    *_TOPK,
    *_PREDICTIVE,
    *_FULL,
    *_SECOND,
    *_LOSS,
    *_NARROW,
]

_BF16 = {**FULL_KL, "precision": "bf16"}
RIGHT: list[Right] = [
    Right("sampled:clip_in_log_space", PPO),
    Right("sampled:clip_by_the_ratio", PPO),
    Right("sampled:clip_from_logits", {**PPO, "clip_low": 0.2, "clip_high": 0.2}),
    Right("sampled:tv_in_one_comparison", BINARY_TV),
    Right("sampled:tv_in_numpy", BINARY_TV),
    Right("sampled:tv_token_by_token", BINARY_TV),
    Right("sampled:kl_with_expm1", BINARY_KL),
    Right("sampled:kl_plain", BINARY_KL),
    Right("sampled:kl_from_logits_in_float64", BINARY_KL),
    Right("topk:kl_gathered", TOPK_KL),
    Right("topk:tv_in_numpy", TOPK_TV),
    Right("topk:predictive_float64", EXACT),
    Right("topk:predictive_log_softmax", EXACT),
    Right("topk:predictive_softmax_then_log", EXACT),
    Right("topk:predictive_chunked", EXACT),
    Right("topk:predictive_rows_apart", EXACT),
    Right("topk:predictive_sorted_sums", EXACT),
    Right("topk:predictive_kahan", EXACT),
    Right("topk:predictive_einsum", EXACT),
    Right("topk:predictive_vmap", EXACT),
    Right("topk:predictive_compiled", EXACT),
    Right("topk:predictive_general_formula", EXACT),
    Right("topk:predictive_complement", EXACT),
    Right("topk:predictive_moments", EXACT),
    Right("topk:predictive_autograd", EXACT),
    Right("topk:predictive_scaled", EXACT),
    Right("topk:predictive_dense_behavior", EXACT),
    Right("topk:predictive_replace", REPLACE),
    Right("topk:aggregated_gathered", AGGREGATED),
    Right("topk:uniform_gathered", UNIFORM),
    Right("topk:bracket_both_ends", BRACKET),
    Right("topk:reverse_kl", REVERSE),
    Right("topk:total_variation", TV),
    Right("topk:second_order", SECOND),
    Right("full:kl", FULL_KL),
    Right("full:kl_by_cross_entropy", FULL_KL),
    Right("full:kl_slopes_shifted", FULL_KL),
    Right("full:kl_in_bf16", _BF16),
    Right("full:reverse_kl", FULL_REVERSE),
    Right("full:total_variation", FULL_TV),
    Right("full:jensen_shannon", FULL_JS),
    Right("full:squared_hellinger", FULL_HELLINGER),
    Right("full:chi2", FULL_CHI2),
    Right("losses:score_form", NONE),
    Right("losses:float64", NONE),
    Right("losses:binary_mask_and_loss", BINARY_TV),
    Right("losses:token_mean", TOKEN_MEAN),
    Right("losses:sequence_mean", SEQUENCE_MEAN),
    Right("losses:fixed_length", FIXED_LENGTH),
]


def in_order(subjects: Sequence[AnySubject]) -> list[AnySubject]:
    """Subjects of equal claims side by side: the engine keeps its truths for a few claims."""

    def claims(subject: Subject) -> str:
        parameters = sorted(inspect.signature(subject.load()).parameters)
        return f"{sorted(map(str, subject.options.items()))} {parameters}"

    return sorted(subjects, key=claims)
