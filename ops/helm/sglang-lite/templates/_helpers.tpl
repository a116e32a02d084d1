{{- define "sglang-lite.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Room is left for "-prefill-" and an ordinal: names of pods are DNS labels. */ -}}
{{- define "sglang-lite.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "sglang-lite.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "sglang-lite.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sglang-lite.selector" -}}
app.kubernetes.io/name: {{ include "sglang-lite.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "sglang-lite.labels" -}}
{{ include "sglang-lite.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "sglang-lite.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "sglang-lite.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "sglang-lite.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "sglang-lite.secret" -}}
{{- if .Values.auth.existingSecret -}}
{{- .Values.auth.existingSecret -}}
{{- else if or .Values.auth.apiKey .Values.auth.adminApiKey -}}
{{- include "sglang-lite.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- /* Keys come as variables: arguments can be read by everybody who may look at pods. */ -}}
{{- define "sglang-lite.keys" -}}
{{- $secret := include "sglang-lite.secret" .root -}}
{{- if $secret }}
- name: SGLANG_LITE_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: api-key, optional: {{ and (not .root.Values.auth.existingSecret) (not .root.Values.auth.apiKey) }}}
{{- if .admin }}
- name: SGLANG_LITE_ADMIN_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: admin-api-key, optional: true}
{{- end }}
{{- end }}
{{- end -}}

{{- /* A pool's values over the defaults of all pools. */ -}}
{{- define "sglang-lite.pool" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.pool) (omit (index .root.Values .name) "") | toJson -}}
{{- end -}}

{{- /* The longest time that any server may take to start, and a minute: the router waits for the first one. */ -}}
{{- define "sglang-lite.startSeconds" -}}
{{- $seconds := 0 -}}
{{- range $name := list "workers" "prefill" "decode" -}}
{{- $pool := include "sglang-lite.pool" (dict "root" $ "name" $name) | fromJson -}}
{{- if gt (int $pool.replicas) 0 }}{{ $seconds = max $seconds (int $pool.startSeconds) }}{{ end -}}
{{- end -}}
{{- add $seconds 60 -}}
{{- end -}}

{{- define "sglang-lite.url" -}}
{{- $service := printf "%s-%s" (include "sglang-lite.fullname" .root) .name -}}
http://{{ $service }}-{{ .ordinal }}.{{ $service }}.{{ .root.Release.Namespace }}.svc:{{ .port }}
{{- end -}}

{{- define "sglang-lite.check" -}}
{{- $v := .Values -}}
{{- if not $v.model.path }}{{ fail "model.path: give a path in a volume, or a repository id" }}{{ end -}}
{{- $pairs := or (gt (int $v.prefill.replicas) 0) (gt (int $v.decode.replicas) 0) -}}
{{- if and $pairs (gt (int $v.workers.replicas) 0) }}{{ fail "workers.replicas: either workers, or prefill and decode" }}{{ end -}}
{{- if and $pairs (or (eq (int $v.prefill.replicas) 0) (eq (int $v.decode.replicas) 0)) }}{{ fail "prefill.replicas and decode.replicas: prefill and decode need each other" }}{{ end -}}
{{- $ports := list (include "sglang-lite.pool" (dict "root" . "name" "prefill") | fromJson).port (include "sglang-lite.pool" (dict "root" . "name" "decode") | fromJson).port -}}
{{- if and $pairs $v.router.discovery (ne (int (first $ports)) (int (last $ports))) }}{{ fail "prefill.port and decode.port: with router.discovery they must be the same" }}{{ end -}}
{{- $prefill := include "sglang-lite.pool" (dict "root" . "name" "prefill") | fromJson -}}
{{- if and $pairs (eq (int $prefill.port) (int $prefill.bootstrapPort)) }}{{ fail "prefill.port and prefill.bootstrapPort: must differ" }}{{ end -}}
{{- if and (not $pairs) (eq (int $v.workers.replicas) 0) }}{{ fail "workers.replicas: no servers; give workers, or prefill and decode, replicas" }}{{ end -}}
{{- end -}}
