"""Four published runs: what SemiAnalysis, "RL Systems Mind the Gap: Matching Trainer and Generator Throughput"
(2026-06-16), reports of them. Lengths in tokens, times in seconds, money in US dollars."""

from __future__ import annotations

DOLLARS_PER_GPU_HOUR = 1.59
TINKER_DOLLARS_PER_MTOK = {"prefill": 0.68, "sample": 1.7, "train": 2.04}

# run A (Prime RL), step by step: mean prompt, response and sequence tokens, rollout seconds
A_STEPS: tuple[tuple[int, int, int, float], ...] = (
    (3629, 10203, 13833, 371),
    (5141, 11898, 17039, 479),
    (5689, 12317, 18006, 529),
    (5118, 13042, 18160, 544),
    (5394, 13360, 18755, 587),
    (6904, 12851, 19755, 656),
    (5897, 13116, 19013, 632),
    (5272, 13418, 18691, 608),
    (6892, 13569, 20461, 688),
    (5971, 13262, 19233, 663),
)
A_BATCH, A_GENERATOR_GPUS, A_TRAINER_GPUS, A_DOLLARS_PER_HOUR = 512, 192, 64, 407.04
# run A: dollars, tokens and dollars per million tokens of each step
A_COSTS: tuple[tuple[float, int, float], ...] = (
    (41.93, 7082240, 5.92),
    (54.16, 8723866, 6.21),
    (59.77, 9218970, 6.48),
    (61.46, 9297818, 6.61),
    (66.34, 9602406, 6.91),
    (74.22, 10114406, 7.34),
    (71.45, 9734502, 7.34),
    (68.74, 9569536, 7.18),
    (77.76, 10476237, 7.42),
    (74.92, 9847450, 7.61),
)
# run A at Tinker's prices: prefill, decode, train, total dollars, dollars per million tokens
A_TINKER: tuple[tuple[float, float, float, float, float], ...] = (
    (1.26, 8.88, 14.45, 24.59, 3.47),
    (1.79, 10.36, 17.8, 29.94, 3.43),
    (1.98, 10.72, 18.81, 31.51, 3.42),
    (1.78, 11.35, 18.97, 32.1, 3.45),
    (1.88, 11.63, 19.59, 33.1, 3.45),
    (2.4, 11.19, 20.63, 34.22, 3.38),
    (2.05, 11.42, 19.86, 33.33, 3.42),
    (1.84, 11.68, 19.52, 33.04, 3.45),
    (2.4, 11.81, 21.37, 35.58, 3.4),
    (2.08, 11.54, 20.09, 33.71, 3.42),
)
# run D (slime), step by step: mean response and sequence tokens, rollout seconds
D_STEPS: tuple[tuple[int, int, float], ...] = (
    (11128, 19702, 593.4),
    (13227, 21473, 479.2),
    (10946, 19777, 518.9),
    (12691, 20357, 479.2),
    (13644, 20628, 426.4),
    (12185, 21004, 522.1),
    (12766, 20257, 555.3),
    (12718, 21383, 523.7),
    (11203, 19127, 374.4),
    (10451, 17228, 527.1),
    (12896, 19333, 455.4),
    (11696, 19603, 457.8),
    (10273, 19183, 433.1),
    (13168, 20730, 513.4),
    (12864, 21939, 481.5),
    (12852, 20193, 423.5),
    (11590, 18860, 620.7),
    (13847, 21686, 508.9),
    (11630, 19900, 496.1),
    (12856, 20922, 454.4),
)
D_BATCH, D_GENERATOR_GPUS, D_TRAINER_GPUS, D_DOLLARS_PER_HOUR = 64, 64, 32, 152.64
# run D at Tinker's prices: prefill, decode, train, total dollars, dollars per million tokens
D_TINKER: tuple[tuple[float, float, float, float, float], ...] = (
    (0.37, 1.21, 2.57, 4.16, 3.3),
    (0.36, 1.44, 2.8, 4.6, 3.35),
    (0.38, 1.19, 2.58, 4.16, 3.28),
    (0.33, 1.38, 2.66, 4.37, 3.36),
    (0.3, 1.48, 2.69, 4.48, 3.39),
    (0.38, 1.33, 2.74, 4.45, 3.31),
    (0.33, 1.39, 2.64, 4.36, 3.36),
    (0.38, 1.38, 2.79, 4.55, 3.33),
    (0.34, 1.22, 2.5, 4.06, 3.32),
    (0.29, 1.14, 2.25, 3.68, 3.34),
    (0.28, 1.4, 2.52, 4.21, 3.4),
    (0.34, 1.27, 2.56, 4.18, 3.33),
    (0.39, 1.12, 2.5, 4.01, 3.27),
    (0.33, 1.43, 2.71, 4.47, 3.37),
    (0.39, 1.4, 2.86, 4.66, 3.32),
    (0.32, 1.4, 2.64, 4.35, 3.37),
    (0.32, 1.26, 2.46, 4.04, 3.35),
    (0.34, 1.51, 2.83, 4.68, 3.37),
    (0.36, 1.27, 2.6, 4.22, 3.32),
    (0.35, 1.4, 2.73, 4.48, 3.35),
)
