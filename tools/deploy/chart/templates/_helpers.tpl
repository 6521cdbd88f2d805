{{- /* Where the DaemonSets' pods run, and how. */ -}}
{{- define "ebpf-cni.pod" -}}
hostNetwork: true
priorityClassName: system-node-critical
# No pod can run on a node before this one does, whatever the node's taints.
tolerations:
  - operator: Exists
nodeSelector:
  {{- toYaml .Values.nodeSelector | nindent 2 }}
# It ends within a second, and leaves the dataplane as it is.
terminationGracePeriodSeconds: 5
{{- end -}}

{{- define "ebpf-cni.image" -}}
image: {{ .Values.image.name }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
# `kubectl describe pod` shows why it gave up.
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{- define "ebpf-cni.rights" -}}
securityContext:
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    add:
      # Load programs, make maps.
      - BPF
      # Attach programs, to cgroups as well, end UDP sockets, read rules and IPsec policies, remove those that portmap leaves, write
      # routes, neighbours and the sysctls below net.
      - NET_ADMIN
      # The verifier's full rules, which the programs need.
      - PERFMON
      {{- if and .Values.sysAdmin (not .Values.cleanup) }}
      # Ask netfilter's connection table, beside kube-proxy: where nf_conntrack is a module, the kernel lends its functions to
      # nobody else. Not needed where it is built in, or where nothing translates addresses: sysAdmin=false of the chart.
      - SYS_ADMIN
      {{- end }}
  # The runtimes' default profiles forbid writing below /sys/fs/bpf (AppArmor) and, in older ones, the system call
  # bpf (seccomp); SELinux forbids a container the host's directories.
  appArmorProfile:
    type: Unconfined
  seccompProfile:
    type: Unconfined
  seLinuxOptions:
    type: spc_t
{{- end -}}

{{- define "ebpf-cni.mounts" -}}
volumeMounts:
  # HostToContainer: what is mounted on the host later appears here too.
  - name: bpffs
    mountPath: {{ .Values.host.bpffs }}
    mountPropagation: HostToContainer
  - name: state
    mountPath: {{ .Values.host.state }}
    mountPropagation: HostToContainer
  # Whether the namespace of a pod whose link is gone still exists. Runtimes use both names.
  - name: netns
    mountPath: /run/netns
    mountPropagation: HostToContainer
    readOnly: true
  - name: netns
    mountPath: /var/run/netns
    mountPropagation: HostToContainer
    readOnly: true
  - name: cni-conf
    mountPath: /etc/cni/net.d
    mountPropagation: HostToContainer
  - name: cni-bin
    mountPath: /opt/cni/bin
    mountPropagation: HostToContainer
  # Runtimes mount /proc/sys read-only into containers, and mount nothing below /proc.
  - name: sysctls
    mountPath: /host/proc/sys/net
    mountPropagation: HostToContainer
  # The cgroup of all of the node's processes, which get programs to reach Services. The container sees its own at /sys/fs/cgroup.
  - name: cgroup
    mountPath: /host/sys/fs/cgroup
    mountPropagation: HostToContainer
    readOnly: true
  # What iptables locks in its older form, and whoever takes rules out of its tables.
  - name: xtables-lock
    mountPath: /run/xtables.lock
    mountPropagation: HostToContainer
  {{- if and .Values.cniChain (not .Values.cleanup) }}
  - name: cni-chain
    mountPath: /etc/ebpf-cni
    readOnly: true
  {{- end }}
{{- end -}}

{{- define "ebpf-cni.volumes" -}}
volumes:
  # Mounted there by systemd. A mount that the agent made would die with its container.
  - name: bpffs
    hostPath:
      path: {{ .Values.host.bpffs }}
      type: Directory
  - name: state
    hostPath:
      path: {{ .Values.host.state }}
      type: DirectoryOrCreate
  - name: netns
    hostPath:
      path: {{ .Values.host.netns }}
      type: DirectoryOrCreate
  - name: cni-conf
    hostPath:
      path: {{ .Values.host.cniConf }}
      type: DirectoryOrCreate
  - name: cni-bin
    hostPath:
      path: {{ .Values.host.cniBin }}
      type: DirectoryOrCreate
  - name: sysctls
    hostPath:
      path: /proc/sys/net
      type: Directory
  - name: cgroup
    hostPath:
      path: {{ .Values.host.cgroup }}
      type: Directory
  - name: xtables-lock
    hostPath:
      path: /run/xtables.lock
      type: FileOrCreate
  {{- if and .Values.cniChain (not .Values.cleanup) }}
  - name: cni-chain
    configMap:
      name: ebpf-cni-chain
  {{- end }}
{{- end -}}
