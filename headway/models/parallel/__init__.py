"""The division of a model's computation among ranks: the tokens of a micro-batch (context parallelism) and the experts
of mixtures (expert parallelism). May import the packed attention, never the decoder, which computes with it. Begin with
`division.py`.
"""
