"""Softmax bandits in torch float64, batched over seeds and contexts.

A context is a prompt's token position, an arm a token.  Every tensor leads with the seed axis
`[S, ...]`; there is no loop over seeds or tokens, and what a seed sees does not depend on the
other seeds of its batch.  Rollouts, masks and updates are those of the training loop of a language
model: a behavior policy `mu` (stale, rounded, tempered, truncated) samples tokens, the training
policy `pi` takes masked policy-gradient steps on them::

    from simulations import bandit

    streams = bandit.Streams(range(64))
    policy, params = bandit.POLICIES["linear"](streams, contexts=32, vocab_size=100, width=8)
"""

from simulations.bandit.behavior import Behavior as Behavior
from simulations.bandit.behavior import rounded as rounded
from simulations.bandit.behavior import straight_through as straight_through
from simulations.bandit.coupled import COUPLED as COUPLED
from simulations.bandit.coupled import Coupled as Coupled
from simulations.bandit.learning import History as History
from simulations.bandit.learning import Setting as Setting
from simulations.bandit.learning import Update as Update
from simulations.bandit.learning import masked_gradient_step as masked_gradient_step
from simulations.bandit.learning import train as train
from simulations.bandit.optimizers import OPTIMIZERS as OPTIMIZERS
from simulations.bandit.policies import POLICIES as POLICIES
from simulations.bandit.policies import Params as Params
from simulations.bandit.policies import Policy as Policy
from simulations.bandit.predictions import PREDICTIONS as PREDICTIONS
from simulations.bandit.predictions import Step as Step
from simulations.bandit.rewards import ADVANTAGES as ADVANTAGES
from simulations.bandit.rewards import REWARDS as REWARDS
from simulations.bandit.rewards import draw_rewards as draw_rewards
from simulations.bandit.rollout import Rollout as Rollout
from simulations.bandit.rollout import divergence as divergence
from simulations.bandit.rollout import keep as keep
from simulations.bandit.rollout import rollout as rollout
from simulations.bandit.rollout import sample as sample
from simulations.bandit.streams import Streams as Streams
from simulations.bandit.variants import Variant as Variant
from simulations.bandit.variants import variants as variants
