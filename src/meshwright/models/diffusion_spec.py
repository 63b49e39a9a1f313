from enum import StrEnum
class NoiseSchedule(StrEnum):
    COSINE="cosine"; LINEAR="linear"
class Prediction(StrEnum):
    NOISE="noise"; VELOCITY="velocity"
