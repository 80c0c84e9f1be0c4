{{- define "forebay.labels" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "forebay.image" -}}
image: "{{ .Values.image.registry }}/{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* What pods of all kinds have, and where they run. */}}
{{- define "forebay.pod" -}}
automountServiceAccountToken: {{ hasKey . "account" }}
{{- with .account }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A process that needs no rights at all. */}}
{{- define "forebay.unprivileged" -}}
runAsNonRoot: true
runAsUser: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The engines as pods of the release's pool, and who of them shares KV through nodes. */}}
{{- define "forebay.discovery" -}}
- --discover
- kubernetes://{{ .Release.Namespace }}/{{ .Release.Name }}
{{- if .Values.node.enabled }}
- --discover-store
- {{ if .Values.node.peers.enabled }}pool{{ else }}host{{ end }}
{{- end }}
{{- end }}

{{/* The engines, by a name that has an address for each of them. */}}
{{- define "forebay.backends" -}}
- --backend-dns
- engine=http://{{ .Release.Name }}-engines.{{ .Release.Namespace }}.svc:{{ (first .Values.modelServers.targetPorts).number }}
{{- end }}
