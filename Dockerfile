# The library with all extras, as the command `pod`; torch's build for NVIDIA GPUs, which also runs without one.
#
#   docker build -t pod-attention .
#   docker run --rm pod-attention fit                                        # lists the recipes
#   docker run --rm --gpus all -v "$PWD:/work" pod-attention fit recipe=llama3-32k model.base=/work/llama
#
# A model of the hub needs HF_TOKEN where it is gated: docker run -e HF_TOKEN ...
FROM python:3.11-slim

# Triton compiles its kernels' launchers with gcc; git is what pip and the hub's tools ask for.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# None of deepspeed's operations are wanted while it is built: no GPU is there then.
ENV DS_BUILD_OPS=0 PIP_NO_CACHE_DIR=1

WORKDIR /opt/pod-attention
COPY . .
RUN python -m pip install -c constraints.txt torch==2.13.0 && python -m pip install -c constraints.txt '.[all]'

WORKDIR /work
ENTRYPOINT ["pod"]
CMD ["--help"]
