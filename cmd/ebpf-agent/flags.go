package main

import (
	"log/slog"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// options is what the command line says, checked.
type options struct {
	config     agent.Config
	kubeconfig string
	level      slog.Level
	json       bool
	masked     []netip.Prefix // as they were given
	dismissed  []string       // variables that were ignored
	stay       bool           // after a cleanup
}

// directoryFlags are the flags that say where things are; cleanup has these alone.
func directoryFlags() []flag {
	return []flag{
		{name: "bpffs", arg: "DIR", value: "/sys/fs/bpf/ebpf-cni", help: "pin directory", takes: absolute,
			set: func(o *options, s string, _ bool) error { return directory((*string)(&o.config.BPFFS), s) }},
		{name: "state-dir", arg: "DIR", value: "/run/ebpf-cni", help: "state directory; on a tmpfs: it must die with the boot, as the pods do", takes: absolute,
			set: func(o *options, s string, _ bool) error { return directory(&o.config.State, s) }},
		{name: "cni-conf-dir", arg: "DIR", value: "/etc/cni/net.d", help: "where 10-ebpf-cni.conflist is written when the node can carry pods", takes: absolute,
			set: func(o *options, s string, _ bool) error { return directory(&o.config.Conf, s) }},
		{name: "cni-bin-dir", arg: "DIR", value: "/opt/cni/bin", help: "where the plugin is installed from beside this executable; empty: not installed", takes: absolute + ", or nothing", emptyCounts: true,
			set: func(o *options, s string, _ bool) error {
				if s == "" {
					return nil
				}
				return directory(&o.config.Bin, s)
			}},
		{name: "proc-sys", arg: "DIR", value: "/proc/sys", help: "where sysctls are written", takes: "a directory that exists",
			set: func(o *options, s string, _ bool) error { return existingDirectory(&o.config.ProcSys, s) }},
		{name: "log-level", arg: "LEVEL", value: "info", help: "debug | info | warn | error", takes: "debug, info, warn or error",
			set: func(o *options, s string, _ bool) error {
				o.config.LogLevel = s
				return choose(&o.level, s, map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError})
			}},
		{name: "log-format", arg: "FORMAT", value: "text", help: "text | json, on stderr", takes: "text or json",
			set: func(o *options, s string, _ bool) error {
				return choose(&o.json, s, map[string]bool{"text": false, "json": true})
			}},
	}
}

// stayFlag is cleanup's own.
func stayFlag() flag {
	return flag{name: "stay", value: "false", help: "wait for SIGTERM afterwards, as the container of a DaemonSet must", takes: trueOrFalse,
		set: func(o *options, s string, _ bool) error { return boolean(&o.stay, s) }}
}

const absolute = "an absolute path of a directory"

// flags are all flags of the agent, in the order of the help.
func flags() []flag {
	return append([]flag{
		{name: "node-name", arg: "NAME", help: "this node; else $NODE_NAME, else the hostname", takes: "the name of a Node", set: nodeName},
		{name: "kubeconfig", arg: "FILE", help: "Kubernetes API; default in-cluster", takes: "a kubeconfig file",
			set: func(o *options, s string, given bool) error { return existingFile(&o.kubeconfig, s, given) }},
		{name: "nodes-file", arg: "FILE", help: "instead of the API: a v1 NodeList or List of Nodes, YAML or JSON, as kubectl get nodes -o yaml prints it; re-read when it changes",
			takes: "a file that exists: a v1 NodeList or List of Nodes, YAML or JSON",
			set:   func(o *options, s string, given bool) error { return existingFile(&o.config.NodesFile, s, given) }},
		{name: "uplink", arg: "IFACE,...", help: "default: every interface that routes lead out of, followed as they change",
			takes: "names of Ethernet interfaces that exist, comma-separated", set: uplinks},
		{name: "masquerade", value: "true", help: "masquerade what pods send to the world", takes: trueOrFalse,
			set: func(o *options, s string, _ bool) error { return boolean(&o.config.Masquerade, s) }},
		{name: "non-masquerade-cidr", arg: "CIDR,...", help: "never masqueraded; podCIDRs and node addresses never need naming", takes: prefixList,
			set: func(o *options, s string, _ bool) error { return o.prefixes(&o.config.NonMasquerade, s) }},
		{name: "cluster-cidr", arg: "CIDR,...", help: "all podCIDRs' parent: never masqueraded, also where a Node is not known yet", takes: prefixList,
			set: func(o *options, s string, _ bool) error { return o.prefixes(&o.config.Cluster, s) }},
		{name: "kube-proxy", arg: "MODE", value: "auto",
			help:  "auto | on | off: whether netfilter translates addresses on this node, as kube-proxy, portmap and rules of your own do; auto: found out, and followed as it changes",
			takes: "auto, on or off", set: kubeProxy},
		{name: "snat-ports", arg: "LOW-HIGH", value: "49152-65535", help: "ports to masquerade to", takes: "LOW-HIGH, each from 1 to 65535", set: snatPorts},
		{name: "snat-entries", arg: "N", value: "262144", help: "capacity of the masquerading tables", takes: "a number from 16 to 16777216",
			set: func(o *options, s string, _ bool) error { return number(&o.config.SnatEntries, s, 16, 1<<24) }},
		{name: "service-cidr", arg: "CIDR,...", help: "no podCIDR may overlap these", takes: prefixList,
			set: func(o *options, s string, _ bool) error { return o.prefixes(&o.config.Service, s) }},
		{name: "address-quarantine", arg: "DUR", value: "60s", help: "how long a freed pod address rests before it is chosen again", takes: "a duration such as 60s or 0",
			set: func(o *options, s string, _ bool) error { return duration(&o.config.Quarantine, s) }},
		{name: "mtu", arg: "N", value: "0", help: "of pods; 0: the uplink's", takes: "0, or a number from 576 to 65535", set: mtu},
		{name: "attach", arg: "HOW", value: "auto", help: "auto | tcx | clsact", takes: "auto, tcx or clsact",
			set: func(o *options, s string, _ bool) error {
				return choose(&o.config.Attach, s, map[string]agent.Attach{"auto": agent.AttachAuto, "tcx": agent.AttachTCX, "clsact": agent.AttachClsact})
			}},
		{name: "mark", arg: "BIT", value: "0x00800000", help: "the one skb mark bit that is ours", takes: "a number with one bit set, but 0x4000 and 0x8000, which are kube-proxy's", set: mark},
		{name: "listen", arg: "ADDR", value: "127.0.0.1:9965", help: "/healthz /readyz /metrics", takes: "HOST:PORT, or nothing for no listener", emptyCounts: true,
			set: func(o *options, s string, _ bool) error { return listener(&o.config.Listen, s) }},
		{name: "metrics-listen", arg: "ADDR", help: "a second listener with /metrics alone, for Prometheus", takes: "HOST:PORT",
			set: func(o *options, s string, _ bool) error { return listener(&o.config.MetricsListen, s) }},
		{name: "portmap", arg: "MODE", value: "auto", help: "auto | on | off: chain the portmap plugin after ours, for host ports; auto: when it is in --cni-bin-dir", takes: "auto, on or off", set: portmap},
	}, directoryFlags()...)
}

// later are flags of features that this version does not have, with the values that manifests have shipped for them.
func later() map[string]string {
	return map[string]string{
		"routing-mode": "direct", "masquerade-ipv6": "true", "vxlan-port": "8472", "vxlan-vni": "4096", "vxlan-udp-checksum": "true",
	}
}
