# Meshwright with the tested versions of its dependencies; PyPI's wheels of PyTorch for Linux contain CUDA's libraries.
# The nodes need only NVIDIA's driver and container toolkit. g++ builds the CPU kernels, and torch.compile's code.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/meshwright
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[tokenizers]'

WORKDIR /training
CMD ["meshwright", "doctor"]
