package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// env is all that the command line takes from its process, so that tests can replace it.
type env struct {
	stdout, stderr io.Writer
	args           []string
	lookup         func(string) (string, bool)
	hostname       func() (string, error)
	executable     func() (string, error)
	findCgroup     func() (string, error)
	run            func(context.Context, agent.Config) error
	cleanup        func(context.Context, agent.Directories, *slog.Logger) error
	cleanKubeProxy func(context.Context, agent.Directories, bool, io.Writer) error
}

// run is the whole program; it returns the exit status.
func run(ctx context.Context, e env) int {
	var serving, cleaning options
	root := &cobra.Command{
		Use:   "ebpf-agent",
		Short: "Keep this node's pod network",
		Long: "ebpf-agent loads the dataplane of this node, keeps it in step with the cluster's Nodes\n" +
			"and repairs what is removed under it. It runs until SIGTERM and leaves the dataplane running.\n\n" +
			"Every flag can be given as an environment variable: --nodes-file as EBPF_AGENT_NODES_FILE.",
		Version: version,
		Args:    e.noArguments,
		RunE:    func(cmd *cobra.Command, _ []string) error { return e.serve(cmd.Context(), &serving) },
	}
	cleanup := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that agent and plugin ever made on this node, live pods' links included",
		Long: "cleanup removes everything that agent and plugin ever made on this node: programs, maps, live pods' links,\n" +
			"routes, addresses, files. It refuses while an agent runs. Sysctls are put back where they still have our\n" +
			"value; ip_forward stays on.\n\n" +
			"Of the agent's flags it takes those that say where things are, and they must say the same.\n\n" +
			"cleanup --kube-proxy removes instead what a kube-proxy has left that runs on this node no more: rules of its\n" +
			"iptables and nftables modes, and of its IPVS mode rules, ipsets and the link kube-ipvs0. Nothing of the kubelet's\n" +
			"goes, and nothing of ours. It prints a line for each thing. An agent with --services auto or on may run, and has\n" +
			"to where the rules still translate: it serves Services before they go, and connections go on. Where nobody would\n" +
			"serve them the rules stay, unless you say --force.",
		Args: e.noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return e.clean(cmd.Context(), &cleaning) },
	}
	root.AddCommand(cleanup)
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cli.Define(root.Flags(), cli.Variable, serving.flags()...)
	cli.Define(cleanup.Flags(), cli.Variable, append(cleaning.directoryFlags(), cleaning.stayFlag())...)
	cli.Define(cleanup.Flags(), nil, cleaning.kubeProxyFlag(), cleaning.forceFlag()) // the agent's flag of the first name has the variable
	return cli.Run(ctx, root, e.lookup)
}

// noArguments says what may have been meant by an argument.
func (e env) noArguments(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if i := slices.Index(e.args, args[0]); i > 0 && strings.HasPrefix(e.args[i-1], "--") && !strings.Contains(e.args[i-1], "=") {
		return fmt.Errorf("unknown argument %q; %s takes its value as in %[2]s=%[1]s", args[0], e.args[i-1])
	}
	if args[0] == "version" {
		return errors.New("unknown command \"version\"; use --version")
	}
	return fmt.Errorf("unknown command %q; the only one is cleanup", args[0])
}

func (e env) serve(ctx context.Context, o *options) error {
	if err := o.complete(e); err != nil {
		return err
	}
	o.config.Log = o.logger(e.stderr)
	o.remark()
	return e.run(ctx, o.config)
}

func (e env) clean(ctx context.Context, o *options) error {
	if err := o.findPlugin(e); err != nil {
		return err
	}
	log := o.logger(e.stderr)
	work := func() error { return e.cleanup(ctx, o.config.Directories, log) }
	switch {
	case o.ofKubeProxy:
		work = func() error { return e.cleanKubeProxy(ctx, o.config.Directories, o.force, e.stdout) }
	case o.force:
		return cli.Misuse("--force: is for --kube-proxy alone")
	}
	if err := work(); err != nil || !o.stay {
		return err
	}
	log.Info("waiting for SIGTERM, as --stay says")
	<-ctx.Done()
	return nil
}

// complete adds what is not in the flags alone.
func (o *options) complete(e env) error {
	o.config.Version = version
	o.config.NotifySocket, _ = e.lookup("NOTIFY_SOCKET") // by systemd
	if o.config.Node == "" {
		o.config.Node, _ = e.lookup("NODE_NAME")
	}
	if o.config.Node == "" {
		name, err := e.hostname()
		if err != nil || name == "" {
			return cli.Misuse("--node-name: not given, and this host has no name; takes the name of a Node")
		}
		o.config.Node = strings.ToLower(name) // as the kubelet does
	}
	if o.config.Portmap && o.config.Bin == "" {
		return cli.Misuse(`--portmap "on": --cni-bin-dir is empty, where the portmap plugin is looked for; takes off then`)
	}
	if err := o.completeRegistry(); err != nil {
		return err
	}
	if err := o.findCgroup(e); err != nil {
		return err
	}
	if err := o.findPlugin(e); err != nil {
		return err
	}
	if o.config.NodesFile != "" || o.config.Registry != nil {
		return nil
	}
	var err error
	o.config.API, err = agent.LoadAPI(o.kubeconfig)
	if errors.Is(err, agent.ErrNotInCluster) {
		return cli.Misuse("--kubeconfig: not given, and this is no pod of a cluster; takes a kubeconfig file (or give --nodes-file, or --registry=etcd)")
	}
	if err != nil && o.kubeconfig != "" {
		return cli.Misuse("--kubeconfig %q: %s; takes a kubeconfig file", o.kubeconfig, readable(err, o.kubeconfig))
	}
	if err != nil {
		return err
	}
	return o.checkServers(e)
}

// checkServers looks at the addresses of API servers beside what the API is otherwise reached at.
func (o *options) checkServers(e env) error {
	service, _ := e.lookup("KUBERNETES_SERVICE_HOST")
	o.config.APIOfService = o.kubeconfig == "" && e.isService(service)
	for _, at := range o.config.APIServers {
		if strings.HasPrefix(at, "http:") && !strings.HasPrefix(o.config.API.Host, "http:") {
			return cli.Misuse("--api-server %q: would be sent unencrypted what the agent is known by; takes an https URL", at)
		}
		if u, _ := url.Parse(at); o.config.Services != agent.ServicesOff && service != "" && u.Hostname() == service && e.isService(service) {
			return cli.Misuse("--api-server %q: is a Service's address, which the agent itself translates; takes the API servers' own", at)
		}
	}
	return nil
}

// isService says whether pods are told an address of the API server that is its Service's. The kubelet tells that twice, and whoever
// replaces it, as by an address of the API server's own, does so in the first place.
func (e env) isService(host string) bool {
	text, told := e.lookup("KUBERNETES_PORT") // such as tcp://10.96.0.1:443
	at, err := url.Parse(text)
	return !told || err != nil || at.Hostname() == host
}

// readable takes out of client-go's error on a kubeconfig what was said already
// and what is only of use to those who know its sources.
func readable(err error, path string) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	line, _, _ = strings.Cut(line, " into Go ")
	return strings.TrimPrefix(line, fmt.Sprintf("error loading config file %q: ", path))
}

// findCgroup checks the cgroup of the node's processes, or finds it. Where nobody insists on Services the node does without, if need be:
// then its own processes alone do not reach them and host ports by the programs.
func (o *options) findCgroup(e env) (err error) {
	const takes = "takes a cgroup2 directory that holds all of the node's processes, such as the host's /sys/fs/cgroup, mounted into a container as the release's manifest does"
	said := "--cgroup: not given"
	if at := o.config.Cgroup; at != "" {
		said = fmt.Sprintf("--cgroup %q", at)
		o.config.Cgroup, err = agent.CheckCgroup(at)
	} else {
		o.config.Cgroup, err = e.findCgroup()
	}
	switch {
	case err == nil:
		return nil
	case o.config.Services == agent.ServicesOn:
		return cli.Misuse("%s, and --services=on needs it: %s; %s", said, err, takes)
	}
	o.config.NoCgroup = fmt.Errorf("%s: %w; %s", said, err, takes)
	return nil
}

// findPlugin looks for the plugin beside our own executable.
func (o *options) findPlugin(e env) error {
	self, err := e.executable()
	if err != nil {
		return fmt.Errorf("find our own executable, beside which the plugin is: %w", err)
	}
	o.config.Plugin = filepath.Join(filepath.Dir(self), agent.Plugin)
	return nil
}

func (o *options) logger(w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(o.config.LogLevel)) // its words are the flag's
	opts := &slog.HandlerOptions{Level: level}
	if o.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// remark logs which settings are ignored, and which are changed.
func (o *options) remark() {
	for _, p := range o.masked {
		o.config.Log.Warn("a prefix of a flag has bits beyond its length", "given", p.String(), "taken", p.Masked().String())
	}
	if o.portmapAuto {
		o.config.Log.Warn("--portmap=auto is off now: host ports are served by the programs; take the setting away (EBPF_AGENT_PORTMAP in the ConfigMap), or chain the portmap plugin with --portmap=on")
	}
	if len(o.config.Chain) > 0 && len(o.config.Bridges) > 0 {
		o.config.Log.Warn("--cni-chain is not used: with --attach-bridge the plugin makes no pods")
	}
	if o.kubeconfig != "" && o.config.NodesFile != "" {
		o.config.Log.Warn("--kubeconfig is not used: --nodes-file is given", "file", o.config.NodesFile)
	}
	if len(o.config.APIServers) > 0 && o.config.NodesFile != "" {
		o.config.Log.Warn("--api-server is not used: --nodes-file is given", "file", o.config.NodesFile)
	}
}
