"""`model`: rules about what is trained."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.magnitudes.bounds import padded_vocabulary, unaligned_vocabulary
from legoai.dsl.analysis.magnitudes.trained import embedding_with
from legoai.dsl.analysis.model import refusal
from legoai.dsl.diagnostics.codes.names import WrongModel
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.rules.base import Check
from legoai.specs.directives.model import FOREIGN
from legoai.specs.models.config_checks import ConfigError
from legoai.specs.models.families import resolve_config
from legoai.specs.models.wrappers import WRAPPERS


class ModelIsKnown(WrongModel, Check):
    """The built-in family has the preset and the dimensions (see ``wrong-model``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        model = analysis.plan.model
        if model.family in FOREIGN:
            if model.target is None:
                noun = "factory" if model.family == "python" else "config file"
                yield self.at(
                    analysis.span_of(model, "family"),
                    f"`{model.family}` needs the {noun} in quotes",
                    label="nothing is named",
                )
            return
        try:
            resolve_config(model.family, model.target, model.arguments)
        except ConfigError as error:
            field = {"preset": "target"}.get(error.argument, error.argument)
            legal = error.legal if len(error.legal) <= 24 else ()
            from legoai.dsl.diagnostics.model_names import our_model

            word = str(model.target if field == "target" else error.argument)
            ours = our_model(word) if field == "target" else None
            help = [f"did you mean `{ours}`?"] if ours is not None else suggestion(word, error.legal)
            if legal:
                help.append(f"legal are {', '.join(f'`{item}`' for item in legal)}")
            yield self.at(analysis.span_of(model, field), error.message, label="not of this model", help=help)


class NoFirstValue(Check):
    """A parameter or buffer of a factory's model without a first value.

    A model is built on the meta device and starts from the values that its constructor gives: by `torch.nn.init`, by
    functions such as `torch.ones`, by copying. What the constructor leaves as `torch.empty` made it must be filled by a
    method of its module, `reset_parameters()` for parameters and `init_buffers()` for buffers. `docs/factories.md` says
    what else a factory offers.
    """

    code = "LP229"
    slug = "no-first-value"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None or not manifest.unfilled:
            return
        path = manifest.unfilled[0]
        holder, _, name = path.rpartition(".")
        module = manifest.modules[holder]
        method = "init_buffers" if name in {item.name for item in module.buffers} else "reset_parameters"
        more = len(manifest.unfilled) - 1
        rest = f", and {more} more" if more else ""
        yield self.at(
            analysis.span_of(analysis.plan.model, "target"),
            f"no first value for `{path}` of `{module.class_name}`{rest}",
            label="its constructor leaves it empty",
            help=[
                f"the initialisation of `{module.class_name}` by transformers leaves it empty too: take another class"
                if analysis.plan.model.family == "huggingface"
                else f"fill it in the constructor, as with `torch.nn.init`, or give `{module.class_name}` a method "
                f"`{method}(self)`",
            ],
        )


class UnfitResult(Check):
    """A factory's model whose forward returns what its loss cannot be computed from.

    The loss is computed outside of the model, by what the model's `reads` states: from logits of every token, or of
    every image, or from the similarities of texts and images. Forward must return them as one tensor; a model that
    returns a loss beside them needs a forward without it. `docs/factories.md` says what is expected.

    ## Example
    ```
    model python("torch.nn:Identity")
    ```

    ## Use instead
    ```
    model llama3("8b")
    ```
    """

    code = "LP230"
    slug = "unfit-result"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, model = analysis.manifest, analysis.plan.model
        if manifest is None or manifest.unfit_result is None:
            return
        yield self.at(
            analysis.span_of(model, "target"),
            manifest.unfit_result,
            label="a training would fail at its first loss",
            help=["return what the model's `reads` states, as one tensor; without `reads`, a model predicts tokens"],
        )


class RefusedInputs(Check):
    """A factory's model whose forward fails for inputs such as a run gives it.

    Lint runs forward on the meta device, with inputs of the kind that the model's `reads` states, by default token ids
    [2, 8], then [4, 128], or with those of `example_inputs()`. A model that takes neither may still take those of a
    run: one that asserts a single length. This warning is not given where the cause is that tensors have no values
    there, or that there is no GPU.

    ## Example
    ```
    model python("torch.nn:Linear", in_features = 3, out_features = 3)
    ```

    ## Use instead
    ```
    model llama3("8b")
    ```
    """

    code = "LP231"
    slug = "refused-inputs"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        error = refusal(analysis)
        if error is None:
            return
        yield self.at(
            analysis.span_of(analysis.plan.model, "target"),
            f"the model may not take what it is trained on: {error}",
            label="forward failed for all inputs that it was tried with",
            help=[
                "state what forward takes by the model's `reads`; without, it takes token ids, int64 [samples, tokens]",
                "or return inputs of a size that it takes by a method `example_inputs()`",
            ],
        )


class SparseGradients(Check):
    """A parameter whose gradient is a sparse tensor, as that of `nn.Embedding(…, sparse = True)` is.

    An `nn.EmbeddingBag`, `F.embedding` and `F.embedding_bag` take the same argument.

    The norm of gradients, units, DTensors and most optimizers take dense gradients.
    """

    code = "LP232"
    slug = "sparse-gradients"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        asked = () if analysis.manifest is None else analysis.manifest.sparse_gradients
        found = embedding_with(analysis, "sparse") or next(iter(asked), None)
        if found is not None:
            yield self.at(
                analysis.span_of(analysis.plan.model, "target"),
                f"`{found}` has a sparse gradient, of which no norm can be computed",
                label="a training would fail at its first step",
                help=["give the embedding, or the function that looks its rows up, no `sparse = True`"],
            )


class WrappedByAuthor(Check):
    """A module that the model itself compiles by `torch.compile(module)`, or wraps in a `CheckpointWrapper`.

    Such a wrapper adds a segment to the paths of its parameters, `_orig_mod` or `_checkpoint_wrapped_module`. Programs
    know parameters by paths without these, which they add and remove themselves. A module that is compiled in place, by
    `module.compile()`, keeps its paths.
    """

    code = "LP233"
    slug = "wrapped-by-author"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, model = analysis.manifest, analysis.plan.model
        modules = () if manifest is None else manifest.modules.values()
        found = next(((info, name) for info in modules for name in info.children if name in WRAPPERS), None)
        if found is None:
            return
        info, segment = found
        assert manifest is not None
        path, statement = general(manifest, info.path), WRAPPERS[segment]
        example = "full" if statement == "checkpoint" else "inductor"
        yield self.at(
            analysis.span_of(model, "target"),
            f"the model wraps `{path}` itself (`{info.class_name}`), so that its parameters have other paths",
            label="a plan decides what is wrapped",
            help=[f"leave the module as it is, and write `{statement} {{ {path} = {example} }}`"],
        )


class HooksOfParameters(Check):
    """A hook that a factory registers on a parameter, for its gradient.

    These are `register_hook` and `register_post_accumulate_grad_hook`. A model is built on the meta device, and gets
    other parameters when a run allocates them: the hooks would never be called. Hooks of modules are kept.
    """

    code = "LP234"
    slug = "hooks-of-parameters"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None or not manifest.left_on_meta.hooked:
            return
        yield self.at(
            analysis.span_of(analysis.plan.model, "target"),
            f"the factory registers hooks on {listed(manifest.left_on_meta.hooked)}, which a run does not call",
            label="its parameters are replaced by others",
            help=[
                "register a hook on the module, by `register_full_backward_hook`, or change in forward what the "
                "parameter computes"
            ],
        )


class TensorsLeftOnMeta(Check):
    """A tensor that a module keeps as a plain attribute, and that its forward reads.

    A model is built on the meta device, where tensors have no values. A run gives values to parameters and buffers
    alone: `self.freqs_cis = precompute_freqs_cis(…)` stays where it is, also in a list, a dictionary, another object
    or a variable of a function. So do the parameters of a module that is not registered, as in `self.layers = [layer]`;
    the optimizer would not know them either.
    """

    code = "LP235"
    slug = "tensors-left-on-meta"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None or not manifest.left_on_meta.tensors:
            return
        (path, name, holder), *more = manifest.left_on_meta.tensors
        owner, rest = manifest.modules[path], f" (and {len(more)} more)" if more else ""
        where = f"`{owner.child_path(name)}` of `{owner.class_name}`{rest}"
        yield self.at(
            analysis.span_of(analysis.plan.model, "target"),
            f"{where} has a `{holder}` that is not registered: it gets no values in a run, and is not trained"
            if holder
            else f"{where} is neither a parameter nor a buffer, and gets no values in a run",
            label="forward reads a plain attribute",
            help=[
                "keep modules in an `nn.ModuleList` or an `nn.ModuleDict`, or as attributes of a module"
                if holder
                else f'write `self.register_buffer("{name}", …, persistent=False)`, or compute it in forward'
            ],
        )


class UnalignedVocabulary(Check):
    """A vocabulary whose logits are computed by slower kernels.

    In half precision the matrix units of NVIDIA GPUs are as fast as they can be where rows of matrices begin at
    multiples of 16 bytes: the vocabulary on a rank is a multiple of 8. Vocabularies are usually padded to a multiple of
    128 times `tp`; the tokens that are added never occur. On an A100 products of an odd vocabulary take 3.4 times as
    long. `cost` predicts that where the device's profile knows it; inductor pads what it compiles.

    ## Example
    ```
    model gpt2("small")
    batch (global = 64, micro = 2, seq_len = 1024)
    mesh  (dp_shard = 32)
    ```

    ## Use instead
    ```
    model gpt2("small", vocab_size = 50304)
    batch (global = 64, micro = 2, seq_len = 1024)
    mesh  (dp_shard = 32)
    ```
    """

    code = "LP836"
    slug = "unaligned-vocabulary"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        model, held, manifest = analysis.plan.model, unaligned_vocabulary(analysis), analysis.manifest
        if held is None:
            return
        assert manifest is not None
        assert manifest.vocab_size is not None
        padded = padded_vocabulary(manifest.vocab_size, analysis.plan.mesh.tp)
        yield self.at(
            analysis.span_of(model, "vocab_size" if "vocab_size" in model.arguments else "target"),
            f"a vocabulary of {manifest.vocab_size} is not a multiple of 8 on a rank: products of logits are slower",
            label=f"{held} on each rank",
            help=[f"pad it to {padded}: the tokens that are added never occur"],
        )
