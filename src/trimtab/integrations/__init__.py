"""Callbacks for other training frameworks: transformers, Lightning and Accelerate.

Each framework has its own module, which imports that framework and no other. The rest is shared.
"""
