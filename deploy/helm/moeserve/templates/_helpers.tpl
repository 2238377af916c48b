{{- define "moeserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "moeserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "moeserve.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "moeserve.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "moeserve.selector" -}}
app.kubernetes.io/name: {{ include "moeserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "moeserve.labels" -}}
{{ include "moeserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The settings file: those of the values, and those that the chart sets. */ -}}
{{- define "moeserve.settings" -}}
{{- $all := merge (dict "host" "0.0.0.0" "port" 8000 "drain-timeout" (int .Values.drainSeconds)) .Values.settings -}}
{{- if .Values.model -}}{{- $_ := set $all "model" .Values.model -}}{{- end -}}
{{- if .Values.admin.enabled -}}{{- $_ := set $all "admin-address" (printf "127.0.0.1:%d" (int .Values.admin.port)) -}}{{- end -}}
{{- if and .Values.gpus.count (not (hasKey $all "device")) -}}{{- $_ := set $all "device" "cuda" -}}{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* KV events: routers know the pod by its address in the topic, which Kubernetes fills in. */ -}}
{{- define "moeserve.kvEvents" -}}
{{- $name := index .Values.settings "served-model-name" | default (base (default "built-in" .Values.model)) | splitList "," | first -}}
{{- dict "enable_kv_cache_events" true "endpoint" (printf "tcp://*:%d" (int .Values.kvEvents.port)) "replay_endpoint" (printf "tcp://*:%d" (int .Values.kvEvents.replayPort)) "topic" (printf "kv@$(POD_IP):8000@%s" $name) | toJson -}}
{{- end -}}
