"""The vLLM connector. Imported inside vLLM only; the rest of kvcellar never imports this.

--kv-transfer-config '{"kv_connector": "KVCellarConnector", "kv_connector_module_path": "kvcellar.vllm",
                       "kv_role": "kv_both"}'
"""

try:
    from kvcellar.vllm.connector import KVCellarConnector, KVCellarHybridConnector
except ImportError as error:
    raise ImportError(
        f"KVCellar's connector works with vLLM 0.26 and 0.32; this vLLM lacks something: {error}"
    ) from error

__all__ = ["KVCellarConnector", "KVCellarHybridConnector"]
