# The runtime of cbmir, without PyTorch: queries, the HTTP service and the DICOM node. Research use, not a medical device.
# `--init`: as process 1 of a container, cbmir would not get a second SIGTERM.
#
#   docker build -t cbmir .
#   docker run --rm --init -p 127.0.0.1:8000:8000 -v ./models:/models:ro -v ./gallery:/gallery -v ./token:/run/token:ro \
#       cbmir serve --model /models/model.onnx --gallery /gallery --host 0.0.0.0 --token-file /run/token

FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# As root nothing runs; the folders that are mounted must be readable (a gallery that is added to: writable) by this user.
RUN useradd --create-home --uid 10001 cbmir
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/cbmir-*.whl)[cpu,openvino,dicom]"
USER 10001
WORKDIR /home/cbmir
# 8000: cbmir serve; 11112: cbmir pacs node.
EXPOSE 8000 11112
STOPSIGNAL SIGTERM
ENTRYPOINT ["cbmir"]
CMD ["--help"]
