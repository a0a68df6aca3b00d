"""Packaging; the settings of the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="remat-tf",
    version="0.1.0",
    description="Train TensorFlow models inside a memory budget by rematerialization",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    # solvers/ and profiles/ are reached through the links remat/solvers and
    # remat/profiles, so that no top-level module called "solvers" is installed.
    packages=find_packages(include=["remat", "remat.*"]),
    package_data={"remat.profiles": ["*.csv", "*.json"], "remat": ["py.typed"]},
    install_requires=[
        "tensorflow>=2.18",
        "keras>=3.5",
        "cylp>=0.94; platform_system != 'Windows'",
        "numpy>=1.26",
        "scipy>=1.11",
        "pandas>=2.1",
        "matplotlib>=3.8",
        "numba>=0.60",
        "psutil>=5.9",
    ],
    extras_require={
        "moccasin": ["ortools>=9.10"],
        "cluster": ["distributed>=2024.1"],
        "experiments": ["scikit-learn>=1.4"],
        "zoo": ["keras-hub>=0.19"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "ortools>=9.10",
            "scikit-learn>=1.4",
            "distributed>=2024.1",
            "nbclient>=0.10",
            "nbformat>=5.10",
            "ipykernel>=6.29",
        ],
    },
    entry_points={"console_scripts": ["remat=remat.__main__:main"]},
)
