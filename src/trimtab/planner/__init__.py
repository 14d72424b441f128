"""Judgement: from estimates to decisions. Pure: what is predicted comes in through an Estimator."""
