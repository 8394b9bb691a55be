"""`python -m engine.gpu_check`: in one short run on a GPU, what is right, how fast it is, and how fast it could be.

Needs torch, transformers, triton and numpy alone. Stages run one after another in a process of their own, which is
made again where it is lost; every figure is in the JSON file as soon as there is one.
"""
