"""The entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes, whatever it serves."""

from importlib.metadata import PackageNotFoundError, version

from transformers import AutoConfig, PreTrainedConfig

# vLLM's interfaces for caches of one's own move with its minor versions: one is written for, tested and let in.
VLLM = "0.32"
FAMILIES = ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")


def register() -> None:
    """Make PoD's models known to vLLM; in a vLLM of another version, make them refuse.

    Other models are served as before in either case, so nothing is raised here.
    """
    found = _vllm_version()
    if not found.startswith(f"{VLLM}."):
        refuse(
            f"PoD models are served by vLLM {VLLM}, and this is vLLM {found}: pip install 'vllm=={VLLM}.*', or use the "
            "pod-attention that was made for it"
        )
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import pod  # noqa: F401  (AutoConfig knows the configs)
    from pod.serving import near_keys  # noqa: F401  (the engine's core knows its block manager)
    from pod.serving.checks import PodConfigCheck

    for family in FAMILIES:
        name = f"Pod{family}ForCausalLM"
        ModelRegistry.register_model(name, f"pod.serving.models:{name}")
        MODELS_CONFIG_MAP[name] = PodConfigCheck


def _vllm_version() -> str:
    """Of whichever distribution brings vLLM: builds for CPUs have names of their own."""
    import vllm

    try:
        return version("vllm")
    except PackageNotFoundError:
        return vllm.__version__


def refuse(why: str) -> None:
    """Let every PoD config say why it cannot be used, when one is loaded.

    A config is what any version of vLLM loads first, and transformers' registry of them does not move.
    """

    class Refused(PreTrainedConfig):
        def __init__(self, *args, **kwargs) -> None:
            raise ValueError(why)

        @classmethod
        def from_dict(cls, *args, **kwargs) -> None:
            raise ValueError(why)

    for family in FAMILIES:
        kind = f"pod_{family.lower()}"
        AutoConfig.register(kind, type(f"Refused{family}", (Refused,), {"model_type": kind}), exist_ok=True)
