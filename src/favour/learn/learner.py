r"""A network whose means, variances, dropout rates and noise are trained through its belief.

The user's model is copied. The copy's dropout modules get trainable rates, its weights the variances of a posterior,
and a predictor of that copy answers every batch with a belief; the loss is

    1/|B| Σ_{i ∈ B} E[−log p(y_i | f(x_i))] + w/N (KL(q ‖ prior) − Σ H(p))

(`favour.learn.losses`). Everything is an ordinary parameter: any optimiser and any training loop will do. Norms keep
the statistics they came with, since a belief is that of the network in use, not in training.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.errors import FavourWarning, InvalidType, InvalidValue, NothingUncertain, ShapeMismatch, UnknownName
from favour.learn import rates, spread
from favour.learn.compiling import of_compiler, optimised
from favour.learn.divergence import GROUPS, Prior, kl, prior_std
from favour.learn.layers import below, called, calls_of, layers_of, prefixed, scale, units_of, within
from favour.learn.likelihoods import Likelihood
from favour.learn.losses import as_likelihood
from favour.posterior import Posterior
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor

LEARN = ("means", "variances", "rates", "noise", "prior")
KINDS = ("mean_field", "rows", "low_rank", "last_layer")
PREFIX = "model."


class Loss(NamedTuple):
    """One batch's objective and its parts, nats for each row; `divergence` is that of all weights, unweighted."""

    total: Tensor
    nll: Tensor
    divergence: Tensor


class Network(nn.Module):
    """A model and the covariance of its weights: `favour.compile` reads it through `favour_posterior`."""

    def __init__(self, model: nn.Module, spreads: spread.Spreads | None, fixed: Posterior) -> None:
        super().__init__()
        self.model, self.spreads, self._fixed = model, spreads, [fixed]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.model(*args, **kwargs)

    def favour_posterior(self) -> Posterior:
        """Of the parameters as this module names them."""
        return prefixed(self._fixed[0] if self.spreads is None else self.spreads.posterior(), PREFIX)


class Learner(nn.Module):
    """A copy of a model, ready to be trained through its belief; `favour.fit` is the training loop around it.

    Args:
        model: Not touched.
        example: Inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        likelihood: Of the targets; a name or an object of `favour.losses`.
        learn, posterior, layers, rank, initial_std, prior, noise, options: See `favour.fit`.
        seed: Of the factors that low-rank posteriors begin with.
        compiled: `loss` goes through `torch.compile`, gradients and divergence included, for batches of the first
            one's shape; others, a smaller last one say, run as they are. What is trained, and the device, stay what
            they are at the first call; inputs are not searched for NaN, only the targets are.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
        >>> learner = Learner(model, x, likelihood="gaussian", noise=1.0)
        >>> optimiser = torch.optim.Adam(learner.parameters(), 1e-2)
        >>> learner.loss(x, y, rows=64).total.backward()
        >>> optimiser.step()
        >>> learner.posterior().names
        ('0.weight', '0.bias', '2.weight', '2.bias')
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        likelihood: str | Likelihood,
        learn: Sequence[str] = LEARN,
        posterior: str | Posterior | Mapping[Any, Any] = "mean_field",
        layers: Sequence[str] | None = None,
        rank: int = 2,
        initial_std: float = 0.1,
        prior: Prior | None = None,
        noise: float | Tensor | None = None,
        seed: int = 0,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.likelihood = as_likelihood(likelihood)
        self.learn = checked_learn(learn, self.likelihood)
        self.example = example
        self._original = [model]  # in a list, so that it is no submodule
        copied = copy.deepcopy(model)
        calls = calls_of(copied, example)
        bayesian = {n for p, m in copied.named_modules() if hasattr(m, "favour_posterior") for n in below(copied, p)}
        start = self._start(copied, calls, bayesian, posterior, layers, rank, initial_std, seed)
        self.rates = rates.make_learnable(copied, units_of(copied, calls)) if "rates" in self.learn else {}
        if "rates" in self.learn and not self.rates and tuple(learn) != LEARN:
            raise InvalidValue(
                'there is no rate to learn: the model has no dropout module with a rate above 0. Leave "rates" out.'
            )
        learned = "variances" in self.learn and not start.is_empty
        spreads = spread.Spreads(start) if learned else None
        self.network = Network(copied, spreads, start)
        self._freeze(copied, bayesian)
        self._set_prior(prior, start)
        self.log_noise: nn.Parameter | None = None
        self.predict = self._predictor(example, options)
        self.compiled = compiled
        self._fast: Any = None  # the compiled objective
        self._shapes: Any = None  # that it is for
        with torch.no_grad():
            mean = self._belief(example).mean
        self._outputs = mean[:1]
        self._scale = 0.0, mean.new_zeros(())  # of the divergence, and as a tensor
        if self.likelihood.noisy:
            shape = self.likelihood.noise_shape(tuple(mean.shape[1:]))
            value = torch.as_tensor(1.0 if noise is None else noise, dtype=mean.dtype, device=mean.device)
            if tuple(value.shape) not in ((), (1,), tuple(shape)):
                raise ShapeMismatch(f"`noise` has shape {tuple(value.shape)}; that of an output is {shape}.")
            if not bool((value > 0).all()):
                raise InvalidValue(f"`noise` is {noise}; a variance above 0 is required.")
            self.log_noise = nn.Parameter(value.log().expand(shape).clone(), "noise" in self.learn)
        elif noise is not None:
            raise InvalidValue(f"`noise` is given, and likelihood {self.likelihood.name!r} has none.")
        if not any(p.requires_grad for p in self.parameters()):
            raise InvalidValue(f"`learn` is {tuple(learn)!r}, and the model has none of these.")

    # ---- making

    def _start(
        self,
        model: nn.Module,
        calls: Mapping[str, Tensor],
        bayesian: set[str],
        posterior: Any,
        layers: Sequence[str] | None,
        rank: int,
        initial_std: float,
        seed: int,
    ) -> Posterior:
        named = dict(model.named_parameters(remove_duplicate=False))
        if not isinstance(posterior, str):
            wrapped = Posterior.wrap(posterior)
            wrapped.validate(named)
            if wrapped.means:
                raise InvalidType("`posterior` replaces means; put them into the model, whose means a fit begins at.")
            return wrapped
        if posterior not in KINDS:
            raise InvalidValue(
                f"`posterior` is {posterior!r}; choose one of {', '.join(KINDS)}, or a favour.Posterior."
            )
        if "variances" not in self.learn:
            return Posterior({})
        chosen = layers_of(model, calls, bayesian)
        if layers is not None:
            unknown = [
                name for name in layers if not any(path == name or path.startswith(f"{name}.") for path in chosen)
            ]
            if unknown:
                raise UnknownName(
                    f"`layers` names {', '.join(f'`{n}`' for n in unknown)}, where no linear or convolutional layer "
                    f"runs; there are {', '.join(f'`{p}`' for p in chosen) or 'none'}."
                )
            chosen = {p: m for p, m in chosen.items() if any(within(p, n) for n in layers)}
        if not chosen:
            if bayesian:
                return Posterior({})  # its own Bayesian layers are learned
            raise InvalidValue("the model has no linear or convolutional layer; give a `posterior` by parameter name.")
        stds = {path: initial_std * scale(layer) for path, layer in chosen.items()}
        return spread.start(posterior, chosen, stds, rank, torch.Generator().manual_seed(seed))

    def _freeze(self, model: nn.Module, bayesian: set[str]) -> None:
        """Leave gradients to what is learned."""
        held = {id(layer.logits) for layer in self.rates.values()}
        means = set(Posterior.from_module(model).names)
        for name, parameter in model.named_parameters():
            if id(parameter) in held:
                continue
            kind = "variances" if name in bayesian and name not in means else "means"
            if isinstance(model.get_submodule(name.rpartition(".")[0]), rates.Dropout):
                kind = "rates"
            parameter.requires_grad_(parameter.requires_grad and kind in self.learn)

    def _set_prior(self, prior: Prior | None, start: Posterior) -> None:
        if "prior" in self.learn and prior is not None and not isinstance(prior, str):
            raise InvalidValue('`prior` is given and "prior" is learned; leave one out.')
        if isinstance(prior, str) and prior not in GROUPS:
            raise InvalidValue(f"`prior` is {prior!r}; choose one of {', '.join(GROUPS)}, or give standard deviations.")
        posterior = self._whole()
        if isinstance(prior, Mapping):
            unknown = [name for name in prior if PREFIX + name not in posterior.names]
            if unknown:
                raise UnknownName(
                    f"`prior` names {', '.join(f'`{n}`' for n in unknown)}, which the posterior does not cover; it "
                    f"covers {', '.join(f'`{n.removeprefix(PREFIX)}`' for n in posterior.names)}."
                )
            prior = {PREFIX + name: value for name, value in prior.items()}
        if prior is None and "prior" not in self.learn:  # the scale that the weights have to begin with
            named = self._named()
            prior = {
                name: scale(self.network.get_submodule(name.rpartition(".")[0]), named[name])
                for name in posterior.names
            }
        self.prior: Prior = "layer" if prior is None else prior

    def _predictor(self, example: Any, options: dict[str, Any]) -> Predictor:
        options = {"check": False} | options
        if self.likelihood.classes and self.likelihood.covariance:
            options.setdefault("task", "classification")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingUncertain)  # noise alone may be learned
            predict = compile(self.network, example, **options)
        return predict

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "predict":  # no submodule: its parameters are the network's
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fast": None, "_shapes": None}  # compiled code is of one learner

    # ---- training

    def _belief(self, x: Any) -> Belief:
        belief = called(self.predict, x)
        if not isinstance(belief, Belief):
            raise InvalidType(f"the model returns a {type(belief).__name__}; a fit takes one tensor of outputs.")
        return belief

    def forward(self, x: Any) -> Belief:
        """The belief over the outputs, differentiable in all that is learned."""
        return self._belief(x)

    def loss(self, x: Any, y: Tensor, rows: int, kl_weight: float = 1.0) -> Loss:
        """The objective on a batch.

        Args:
            x: Inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
            y: Their targets.
            rows: N, of the whole training set.
            kl_weight: w of the divergence; 1 for the bound.
        """
        scale = kl_weight / rows
        shapes = [tuple(t.shape) for t in pytree.tree_leaves((x, y)) if isinstance(t, Tensor)]
        if self.compiled and torch.is_grad_enabled() and self._shapes in (None, shapes):
            target = self.checked(y)
            if self._fast is None:
                self._shapes, self._fast = shapes, optimised(self._objective)
            if scale != self._scale[0]:
                self._scale = scale, self._outputs.new_tensor(scale)
            try:
                return Loss(*self._fast(x, target, self._scale[1]))
            except Exception as error:
                if not of_compiler(error):
                    raise
                self.compiled, self._fast = False, None
                warnings.warn(f"this objective cannot be compiled, and runs as it is: {error}", FavourWarning, 2)
        return Loss(*self._objective(x, y, scale))

    def _objective(self, x: Any, y: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        belief = self._belief(x)
        nll = self.likelihood.expected(belief, self.targets(y, belief), self.noise()).mean()
        divergence = self.divergence().to(nll)
        return nll + scale * divergence, nll, divergence

    def _apply(self, fn: Any, recurse: bool = True) -> Learner:
        """`.to` and friends: compiled code is of one device."""
        self._fast = self._shapes = None
        super()._apply(fn, recurse)
        self._outputs = fn(self._outputs)
        self._scale = 0.0, self._outputs.new_zeros(())
        return self

    def checked(self, y: Tensor) -> Tensor:
        """Checked targets, before there are predictions."""
        return self.likelihood.targets(y, self._outputs.expand(len(y), *self._outputs.shape[1:]))

    def targets(self, y: Tensor, belief: Belief) -> Tensor:
        """Checked targets."""
        if len(y) != len(belief.mean):
            raise ShapeMismatch(f"{len(belief.mean)} predictions and {len(y)} targets; there must be as many of both.")
        return self.likelihood.targets(y, belief.mean)

    def divergence(self) -> Tensor:
        """KL of the weights from their prior, less the entropies of rates that are learned."""
        posterior = self._whole()
        terms = [layer.kl() for layer in self.rates.values()]
        if not posterior.is_empty:
            terms.append(kl(posterior, self.prior, parameters=self._named()))
        return torch.stack([t.to(terms[-1]) for t in terms]).sum() if terms else torch.zeros(())

    def noise(self) -> Tensor | None:
        """The noise's variance; None where the likelihood has none."""
        return None if self.log_noise is None else self.log_noise.exp()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What is trained, by the names of `learn`."""
        logits = {id(layer.logits) for layer in self.rates.values()}
        means = {id(p) for n, p in self.network.model.named_parameters() if n not in self._own_spreads()}
        groups: dict[str, list[nn.Parameter]] = {}
        for parameter in self.parameters():
            if not parameter.requires_grad:
                continue
            kind = "rates" if id(parameter) in logits else "means" if id(parameter) in means else "variances"
            groups.setdefault("noise" if parameter is self.log_noise else kind, []).append(parameter)
        return groups

    def _own_spreads(self) -> set[str]:
        """Parameters of the model's own Bayesian layers that are no means."""
        model = self.network.model
        means = set(Posterior.from_module(model).names)
        bayesian = {n for p, m in model.named_modules() if hasattr(m, "favour_posterior") for n in below(model, p)}
        return bayesian - means

    # ---- results

    def _whole(self) -> Posterior:
        return Posterior.from_module(self.network)

    def _named(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters(remove_duplicate=False))

    def posterior(self) -> Posterior:
        """The posterior as it is, by the model's names, without gradients; its own Bayesian layers included."""
        with torch.no_grad():
            return prefixed(self._whole(), "", PREFIX)

    def prior_stds(self) -> dict[str, Tensor]:
        """Standard deviations of the prior by parameter name."""
        posterior = self._whole()
        with torch.no_grad():
            if isinstance(self.prior, str):
                stds = prior_std(posterior, self.prior, parameters=self._named())
            else:
                priors = self.prior if isinstance(self.prior, Mapping) else dict.fromkeys(posterior.names, self.prior)
                stds = {n: torch.as_tensor(priors[n]) for n in posterior.names}
        return {n.removeprefix(PREFIX): s for n, s in stds.items()}

    def rate_values(self) -> dict[str, Tensor]:
        """Learned rates by module path."""
        return {path: layer.p.detach().clone() for path, layer in self.rates.items()}

    def fitted_model(self) -> nn.Module:
        """A copy of the model with the means and rates as they are now, in the user's own modules."""
        model = copy.deepcopy(self.network.model)
        original = self._original[0]
        for path, layer in self.rates.items():
            old = original.get_submodule(path)
            trains = isinstance(old, rates.Dropout) and old.learnable
            new = layer if trains else rates.with_rate(old, layer.p.detach())
            if not path:
                return new
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, copy.deepcopy(new))
        flags = {n: p.requires_grad for n, p in original.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, True))
        return model


def checked_learn(learn: Sequence[str], likelihood: Likelihood) -> tuple[str, ...]:
    """The parts to learn; of the default those that exist."""
    if isinstance(learn, str):
        raise InvalidType(f"`learn` is {learn!r}; give a tuple of names, such as ({learn!r},).")
    unknown = [name for name in learn if name not in LEARN]
    if unknown:
        raise InvalidValue(f"`learn` names {', '.join(map(repr, unknown))}; choose among {', '.join(LEARN)}.")
    if not learn:
        raise InvalidValue(f"`learn` is empty; choose among {', '.join(LEARN)}.")
    if tuple(learn) == LEARN:
        return tuple(n for n in learn if n != "noise" or likelihood.noisy)
    if "noise" in learn and not likelihood.noisy:
        raise InvalidValue(f'likelihood {likelihood.name!r} has no noise to learn; leave "noise" out.')
    return tuple(learn)
