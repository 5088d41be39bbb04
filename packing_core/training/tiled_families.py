"""Families whose layers long rows compute by tiles, as the formula of memory counts them before a model is loaded.

The formula counts the layers of a family that is not named as whole, so that it promises no row that does not fit. Of
a loaded model it counts what that has. tests/torch_backend/hf/test_tiled_families.py holds both lists.
"""

_MLPS = """
afmoe aria_text bamba beam cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v3 diffllama doge dots1 ernie4_5
ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm4_moe gpt_oss granite granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder kolibri1 laguna llama mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral
nemotron_h olmo olmo2 olmo3 olmoe phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
recurrent_gemma smollm3 solar_open stablelm vaultgemma gemma4_text glm4v_moe_text qwen2_vl_text qwen2_5_vl_text
qwen3_vl_text qwen3_vl_moe_text
"""
_PROJECTIONS = """
apertus arcee bitnet cwm diffllama ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite granite_swa granitemoe
granitemoe_swa granitemoeshared helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder llama mellum mimo_v2_flash
minimax_m2 ministral ministral3 mistral mixtral olmoe qwen2 qwen3 qwen3_moe seed_oss smollm3 vaultgemma
qwen3_vl_text qwen3_vl_moe_text
"""
# MLPs of a gate, an upper and a lower projection and nothing besides, and routed experts.
MLPS = frozenset(_MLPS.split())
# Every layer hands each norm to one part alone, and these are attention by three projections and an MLP or experts.
PROJECTIONS = frozenset(_PROJECTIONS.split())
