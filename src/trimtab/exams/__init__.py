"""The exam: recorded measurements, replayed against today's predictor."""
