{{/* Name of a pool's objects: nodeagent, or nodeagent-POOL. */}}
{{- define "nodeagent.name" -}}
{{- if eq .pool "default" -}}nodeagent{{- else -}}nodeagent-{{ .pool }}{{- end -}}
{{- end -}}

{{- define "nodeagent.labels" -}}
app.kubernetes.io/name: nodeagent
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
nodeagent/pool: {{ .pool }}
{{- end -}}

{{- define "nodeagent.image" -}}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/." .Values.image.repository) -}}
{{- fail (printf "image.repository is %q: name registry and repository of the image that you have built and pushed, like registry.example/nodeagent (docs/install.md). Of a short name a search list of each node would decide what runs there as root" .Values.image.repository) -}}
{{- end -}}
{{- if eq (toString .Values.image.tag) "latest" -}}
{{- fail "image.tag is latest: nodes would run what the registry had when each of them pulled, and keep it. Name the version that you have pushed, or image.digest" -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Settings of a pool: what 'host' says, then the general ones, then the pool's own. */}}
{{- define "nodeagent.settings" -}}
{{- $host := .root.Values.host -}}
{{- $runtime := $host.runtime -}}
{{- $given := mergeOverwrite (deepCopy .root.Values.settings) (deepCopy (.values.settings | default dict)) -}}
{{- $audit := dict -}}
{{- if $runtime.bundles -}}{{- $_ := set $audit "containers" $runtime.bundles -}}{{- end -}}
{{- $preheat := dict "socket" (printf "%s/%s" $runtime.socketDir $runtime.socket) -}}
{{- if $runtime.hosts -}}{{- $_ := set $preheat "hosts_dir" $runtime.hosts -}}{{- end -}}
{{- $csi := dict "enabled" .root.Values.csi.enabled -}}
{{- $cache := dict "store" (printf "%s/store" $host.state) "views" (printf "%s/views" $host.state) "csi" $csi -}}
{{- $known := dict
  "cache" $cache
  "volumes" (dict "audit" $audit)
  "preheat" $preheat -}}
{{- $made := dict
  "admin" (dict "metrics" (printf "127.0.0.1:%v" .root.Values.port))
  "kubelet" (dict "root_dir" $host.kubelet "image_dir" $runtime.images)
  "state_dir" (printf "%s/state" $host.state) -}}
{{- range $section, $values := $known -}}
{{- if index $given $section -}}{{- $_ := set $made $section $values -}}{{- end -}}
{{- end -}}
{{- if .root.Values.kubernetes.enabled -}}{{- $_ := set $made "kubernetes" dict -}}{{- end -}}
{{- $secure := include "nodeagent.scraped" .root -}}
{{- if $secure -}}
{{- $_ := set $made.admin "api" (dict
  "listen" (printf "0.0.0.0:%v" .root.Values.metrics.port)
  "cert_file" "/etc/nodeagent/metrics/tls.crt"
  "key_file" "/etc/nodeagent/metrics/tls.key"
  "kubernetes" dict) -}}
{{- end -}}
{{- $all := mergeOverwrite $made $given -}}
{{- range $section, $values := (.values.settings | default dict) -}}
{{- if kindIs "invalid" $values -}}{{- $_ := unset $all $section -}}{{- end -}}
{{- end -}}
{{- range $room := list "cache" "volumes" "preheat" -}}
{{/* A room is left out because somebody set it to null; the guard asks for that word (docs/guard.md). */}}
{{- if not (hasKey $all $room) -}}{{- $_ := set $all $room nil -}}{{- end -}}
{{- end -}}
{{- /* Where these words have no quotes, YAML takes them for true and false. */ -}}
{{- if kindIs "map" $all.volumes -}}
{{- range $section := list "guard" "repair" -}}
{{- $found := index $all.volumes $section -}}
{{- if kindIs "map" $found -}}{{- if kindIs "bool" $found.mode -}}{{- $_ := set $found "mode" (ternary "on" "off" $found.mode) -}}{{- end -}}{{- end -}}
{{- end -}}
{{- $actions := (($all.volumes).audit).actions -}}
{{- if kindIs "map" $actions -}}
{{- range $action, $mode := $actions -}}
{{- if kindIs "bool" $mode -}}{{- $_ := set $actions $action (ternary "on" "off" $mode) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "store" "views" -}}
{{- $path := toString ((($all.cache) | default dict) | dig $name "") -}}
{{- if and $path (not (hasPrefix (printf "%s/" $host.state) (clean $path))) -}}
{{- fail (printf "pool %s: settings.cache.%s is %s, which the pod does not have from the host: only host.state (%s) is mounted. It would lie in the container's own layer. Set host.state to a directory of that disk, or mount the disk on the host below %s and name a path there" $.pool $name $path $host.state $host.state) -}}
{{- end -}}
{{- end -}}
{{- $port := .root.Values.port -}}
{{- $admin := $all.admin | default dict -}}
{{- $metrics := toString ($admin.metrics | default "null") -}}
{{- if not (has $metrics (list (printf "127.0.0.1:%v" $port) (printf "0.0.0.0:%v" $port))) -}}
{{- fail (printf "pool %s: settings.admin.metrics is %s, and the probes ask 127.0.0.1:%v ('port'). They would find nobody, and kubelet would kill each agent again and again. Leave admin.metrics out, or set it to 0.0.0.0:%v; another port is set by 'port'" .pool $metrics $port $port) -}}
{{- end -}}
{{- /* In the image /var/run is a link to /run. What is mounted below takes no socket: the agent only reads it. */ -}}
{{- $socket := regexReplaceAll "^/var/run/" (clean (toString ($admin.socket | default "/run/nodeagent/admin.sock"))) "/run/" -}}
{{- $possible := hasPrefix "/run/" $socket -}}
{{- $read := list $runtime.socketDir $runtime.images $runtime.hosts $host.kubelet "/run/log/journal" "/run/secrets" -}}
{{- range $below := concat $read $host.paths | compact -}}
{{- if hasPrefix (printf "%s/" (regexReplaceAll "^/var/run/" $below "/run/")) $socket -}}{{- $possible = false -}}{{- end -}}
{{- end -}}
{{- /* It is mounted to be written, also below a directory that is not. */ -}}
{{- if hasPrefix (printf "%s/" $host.state) $socket -}}{{- $possible = true -}}{{- end -}}
{{- if not $possible -}}
{{- fail (printf "pool %s: settings.admin.socket is %s, which the pod only reads, or which is neither below /run nor below host.state. Leave it out, or name a place below /run or host.state (%s)" .pool $socket $host.state) -}}
{{- end -}}
{{- if hasSuffix (printf ":%v" $port) (toString ($admin.api | default dict).listen) -}}
{{- fail (printf "pool %s: settings.admin.api.listen has the port %v of metrics and probes ('port'): no agent could start. Choose another port" .pool $port) -}}
{{- end -}}
{{- if $secure -}}
{{- $api := $admin.api | default dict -}}
{{- $host := regexReplaceAll ":[^:]*$" (toString $api.listen) "" -}}
{{- if not (has $host (list "0.0.0.0" "[::]")) -}}
{{- fail (printf "pool %s: settings.admin.api.listen is %s, and metrics.podMonitor.enabled has Prometheus ask each node at its own address: it would find nobody, or one node. Leave admin.api.listen out, or set it to 0.0.0.0:%v" .pool (toString $api.listen) .root.Values.metrics.port) -}}
{{- end -}}
{{- if not (hasSuffix (printf ":%v" .root.Values.metrics.port) (toString $api.listen)) -}}
{{- fail (printf "pool %s: metrics.podMonitor.enabled asks port %v ('metrics.port'), and settings.admin.api.listen is %s: Prometheus would find nobody. Leave admin.api.listen out, or set metrics.port" .pool .root.Values.metrics.port (toString $api.listen)) -}}
{{- end -}}
{{- if or (ne (toString $api.cert_file) "/etc/nodeagent/metrics/tls.crt") (ne (toString $api.key_file) "/etc/nodeagent/metrics/tls.key") -}}
{{- fail (printf "pool %s: metrics.podMonitor.enabled has Prometheus check the certificate of 'metrics.certificate', and settings.admin.api names another one (%s). Leave cert_file and key_file out and name your Secret in metrics.certificate.secretName" .pool (toString $api.cert_file)) -}}
{{- end -}}
{{- if not (kindIs "map" $api.kubernetes) -}}
{{- fail (printf "pool %s: metrics.podMonitor.enabled has Prometheus show a token of the cluster, and settings.admin.api.kubernetes is null: nobody would know the token. Leave it out" .pool) -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* "true" when a Prometheus is to scrape the agents: by its operator, or by its own account. */}}
{{- define "nodeagent.scraped" -}}
{{- $metrics := .Values.metrics | default dict -}}
{{- $account := $metrics.serviceAccount | default dict -}}
{{- if or ($metrics.podMonitor).enabled $account.name $account.namespace -}}
{{- include "nodeagent.given" (dict "root" . "paths" (list "metrics.port" "metrics.podMonitor.interval" "metrics.podMonitor.scrapeTimeout")) -}}
{{- if ne (empty $account.name) (empty $account.namespace) -}}
{{- fail (printf "metrics.serviceAccount has name %q and namespace %q: an account has both. Set both, or neither" (toString $account.name) (toString $account.namespace)) -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* Refuses values without these paths: 'helm upgrade --reuse-values' has those of the chart that was installed. */}}
{{- define "nodeagent.given" -}}
{{- $root := .root -}}
{{- range $path := .paths -}}
{{- $found := $root.Values -}}
{{- range $key := splitList "." $path -}}{{- $found = index ($found | default dict) $key -}}{{- end -}}
{{- if empty $found -}}
{{- fail (printf "%s is missing: these values are of an older chart. Upgrade with --reset-then-reuse-values (helm 3.14 or newer) in place of --reuse-values, or set %s" $path $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the certificate of the scraped port. That of cert-manager has a name of its own: helm takes the
chart's away, and cert-manager does not write into one that helm made. */}}
{{- define "nodeagent.metricsSecret" -}}
{{- $given := .Values.metrics.certificate | default dict -}}
{{- $issued := ($given.certManager).issuerRef -}}
{{- if and $given.secretName $issued -}}
{{- fail (printf "metrics.certificate has secretName %q and certManager.issuerRef: name one of them" $given.secretName) -}}
{{- end -}}
{{- $given.secretName | default (printf "%s--metrics%s" .Release.Name (ternary "-issued" "" (not (empty $issued)))) -}}
{{- end -}}

{{- define "nodeagent.metricsServer" -}}
nodeagent-metrics.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The settings that an agent takes over by a restart alone: of the process itself, and which rooms there are. */}}
{{- define "nodeagent.restart" -}}
{{- $settings := include "nodeagent.settings" . | fromYaml -}}
{{- $fixed := pick $settings "admin" "kubernetes" "state_dir" -}}
{{- range $room := list "cache" "volumes" "preheat" -}}
{{- if kindIs "map" (index $settings $room) -}}{{- $_ := set $fixed $room true -}}{{- end -}}
{{- end -}}
{{- $fixed | toJson -}}
{{- end -}}

{{/* Directories of the host that the settings of a pool name: sources of kind 'dir', and host.paths. */}}
{{- define "nodeagent.paths" -}}
{{- $paths := .root.Values.host.paths -}}
{{- $settings := include "nodeagent.settings" . | fromYaml -}}
{{- range ((($settings).cache).datasets | default list) -}}
{{- if eq .source.kind "dir" -}}{{- $paths = append $paths .source.path -}}{{- end -}}
{{- end -}}
{{- $paths | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* "true" when the agents of a pool ask the API server about their callers. */}}
{{- define "nodeagent.asks" -}}
{{- $settings := include "nodeagent.settings" . | fromYaml -}}
{{- if kindIs "map" ((($settings).admin).api).kubernetes -}}true{{- end -}}
{{- end -}}

{{/* "true" when the agents of a pool serve volumes. */}}
{{- define "nodeagent.csi" -}}
{{- $settings := include "nodeagent.settings" . | fromYaml -}}
{{- if ((($settings).cache).csi).enabled -}}true{{- end -}}
{{- end -}}

{{/* "true" when the agents of a pool ask and mark PersistentVolumes (docs/guard.md). */}}
{{- define "nodeagent.witnesses" -}}
{{- $settings := include "nodeagent.settings" . | fromYaml -}}
{{- if and (kindIs "map" $settings.volumes) (not (($settings).kubernetes).kubeconfig) -}}
{{- if ne (toString (($settings.volumes).kubernetes).enabled) "false" -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" when the agents of a pool follow objects of the cluster with their own account. */}}
{{- define "nodeagent.follows" -}}
{{- $kubernetes := (include "nodeagent.settings" . | fromYaml).kubernetes -}}
{{- if and (kindIs "map" $kubernetes) (not ($kubernetes).kubeconfig) (ne (toString ($kubernetes).objects) "false") -}}true{{- end -}}
{{- end -}}

{{/* "true" when the agents of a pool have an account of the cluster. */}}
{{- define "nodeagent.account" -}}
{{- if or (include "nodeagent.asks" .) (include "nodeagent.witnesses" .) (include "nodeagent.follows" .) -}}true{{- end -}}
{{- end -}}
