# Adds an own package, such as one of rewards, to a finished image. The build context is the package's folder.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
USER root
COPY . /opt/rlpipe/extra
RUN sh /opt/rlpipe/install.sh extra
USER 1000:1000
