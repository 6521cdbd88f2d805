package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// Error codes from 100 on are the plugin's own.
const (
	codeNoAddress   uint = 100 // no address is left, or the requested or allocated one is taken
	codeCheckFailed uint = 101 // CHECK found differences
	codeExists      uint = 102 // ADD of an attachment that exists, in another namespace, with other host ports or incomplete
	codeHostPort    uint = 103 // a host port is another pod's, or a NodePort, or they are more than the pod may have
)

// lockWait bounds the wait for the node's lock. An upgrade holds it for milliseconds, while it replaces the program of
// every pod; while it waits itself, it lets others pass every few seconds.
const lockWait = 10 * time.Second

// longWait is how long a wait for locks must take to be told in the log.
const longWait = time.Second

// undoWait bounds the waits for locks while a failed ADD is undone, even if its own time is used up.
const undoWait = 5 * time.Second

// delegateWait bounds the wait for another ipam plugin; runtimes wait for a pod's network for two minutes and more.
const delegateWait = 50 * time.Second

// hostPortWait bounds the wait for the agent to have the programs serve host ports, which takes it a start.
const hostPortWait = 30 * time.Second

// errNoRoom is returned (wrapped) when a full file system has no room for a lock file, which does not exist.
var errNoRoom = errors.New("no room for a lock file")

// versions returns the supported versions of the specification.
func versions() version.PluginInfo {
	return version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// Main runs the operation that the environment and standard input ask for, and ends the process with status 1 if that
// fails. release is the build's version.
func Main(release string) {
	p := &plugin{stdout: os.Stdout, stderr: os.Stderr, delegateWait: delegateWait, wait: lockWait, hostPortWait: hostPortWait}
	skel.PluginMainFuncs(p.funcs(), versions(), "CNI plugin ebpf-cni "+release)
}

type plugin struct {
	stdout, stderr io.Writer
	wait           time.Duration // for locks
	delegateWait   time.Duration // for another ipam plugin
	hostPortWait   time.Duration // for programs that serve host ports
	// step is for tests, see endpoint.Releaser; ADD's last one is "result".
	step func(name string) error
}

func (p *plugin) funcs() skel.CNIFuncs {
	return skel.CNIFuncs{
		Add: p.verb("ADD", (*call).add), Del: p.verb("DEL", (*call).del), Check: p.verb("CHECK", (*call).check),
		GC: p.verb("GC", (*call).gc), Status: p.verb("STATUS", (*call).status),
	}
}

// verb makes an operation callable for the library.
func (p *plugin) verb(name string, do func(*call) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		c, done, err := p.begin(name, args)
		if err != nil {
			return err
		}
		defer done()
		return c.finish(do(c))
	}
}

// call is one call of the plugin: its checked parameters and its logger.
type call struct {
	*plugin
	*conf
	verb string
	id   endpoint.ID
	args *skel.CmdArgs
	log  *slog.Logger
	// pod and podUID are what the runtime calls the pod, empty where it does not say.
	pod, podUID string
}

// begin checks the parameters of an operation. done must be called when it is over.
func (p *plugin) begin(verb string, args *skel.CmdArgs) (c *call, done func(), err error) {
	parsed, err := parseConf(args.StdinData)
	if err != nil {
		return nil, nil, err
	}
	c = &call{plugin: p, conf: parsed, verb: verb, args: args, id: endpoint.ID{ContainerID: args.ContainerID, IfName: args.IfName}}
	if verb != "GC" && verb != "STATUS" {
		if err := c.id.Validate(); err != nil {
			return nil, nil, types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
		}
	}
	log, closeLog := openLog(parsed, p.stderr)
	c.log = log.With("command", verb, "network", parsed.network)
	if args.ContainerID != "" {
		c.log = c.log.With("container", args.ContainerID, "ifname", args.IfName)
	}
	var unnamed error
	if c.pod, c.podUID, unnamed = podOf(args.Args); c.pod != "" {
		c.log = c.log.With("pod", c.pod)
	}
	if unnamed != nil { // it is for people: no reason to refuse the pod
		c.log.Warn("CNI_ARGS: what the pod is called is left out", "error", unnamed)
	}
	start := time.Now()
	return c, func() {
		c.log.Debug("done", "duration", time.Since(start))
		closeLog()
	}, nil
}

// finish logs an operation's error and makes it one that the runtime understands.
func (c *call) finish(err error) error {
	if err == nil {
		return nil
	}
	c.log.Error("operation failed", "error", err)
	if coded, ok := errors.AsType[*types.Error](err); ok {
		return types.NewError(coded.Code, withoutDetails(err, coded), coded.Details)
	}
	if errors.Is(err, bpffs.ErrLocked) || errors.Is(err, endpoint.ErrNoDataplane) {
		return types.NewError(types.ErrTryAgainLater, err.Error(), "")
	}
	return types.NewError(types.ErrInternal, err.Error(), "")
}

// withoutDetails is the text of the whole chain without the details of the innermost error, which have their own field.
func withoutDetails(err error, coded *types.Error) string {
	return strings.Replace(err.Error(), coded.Error(), coded.Msg, 1)
}

// openLog opens the configured log file, or else standard error. A file that can't be opened is not worth refusing a
// pod.
func openLog(c *conf, stderr io.Writer) (*slog.Logger, func()) {
	options := &slog.HandlerOptions{Level: c.logLevel}
	if c.logFile == "" {
		return slog.New(slog.NewTextHandler(stderr, options)), func() {}
	}
	f, err := os.OpenFile(c.logFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		log := slog.New(slog.NewTextHandler(stderr, options))
		log.Warn("log file can't be opened, logging to standard error", "error", err)
		return log, func() {}
	}
	return slog.New(slog.NewTextHandler(f, options)), func() { _ = f.Close() }
}

// shared runs fn while holding the node's lock, shared, and the lock of the call's endpoint.
func (c *call) shared(fn func(context.Context) error) error { return c.sharedFor(c.id, fn) }

// sharedFor is shared with the lock of another endpoint.
func (c *call) sharedFor(id endpoint.ID, fn func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.wait)
	defer cancel()
	began := time.Now()
	node, err := bpffs.Shared(ctx, c.stateDir, c.verb)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no state directory: %w", endpoint.ErrNoDataplane, err)
	}
	if err != nil {
		return lockError(err)
	}
	defer node.Release()
	own, err := endpoint.Acquire(ctx, c.stateDir, id)
	if err != nil {
		return lockError(err)
	}
	defer own.Release()
	if waited := time.Since(began); waited > longWait {
		c.log.Warn("waited long for locks", "duration", waited)
	}
	return fn(ctx)
}

func lockError(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", errNoRoom, err)
	}
	return err
}

// releaser releases endpoints, with the quarantine of the configuration.
func (c *call) releaser() endpoint.Releaser {
	return endpoint.Releaser{StateDir: c.stateDir, Pins: c.pins, Quarantine: c.quarantine, Log: c.log, Step: c.step}
}

// openNetNS opens the pod's namespace and refuses the node's own.
func openNetNS(path string) (*device.NetNS, error) {
	pod, err := device.OpenNetNS(path)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, "CNI_NETNS: "+err.Error(), "")
	}
	host, err := device.CurrentNetNS()
	if err != nil {
		pod.Close()
		return nil, err
	}
	defer host.Close()
	same, err := pod.Same(host)
	if err == nil && same {
		err = types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("CNI_NETNS: %s is the node's own network namespace", path), "")
	}
	if err != nil {
		pod.Close()
		return nil, err
	}
	return pod, nil
}
