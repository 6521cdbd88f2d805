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
	codeNoAddress   uint = 100 // no address is left, or the one asked for or given is taken
	codeCheckFailed uint = 101 // the world is not as prevResult says
	codeExists      uint = 102 // ADD of an attachment that exists, for another namespace or half gone
)

// lockWait bounds the wait for the node's lock. An upgrade holds it for as long as it takes to replace the program on
// every pod, which is milliseconds, and one that waits in vain lets others pass every few seconds.
const lockWait = 10 * time.Second

// undoWait bounds the waits for locks while a failed ADD is undone, whatever it had left of its own time.
const undoWait = 5 * time.Second

// delegateWait bounds the wait for another ipam plugin; runtimes wait for a pod's network for two minutes and more.
const delegateWait = 50 * time.Second

// errNoRoom is returned (wrapped) where a full file system has no room for a lock file, which therefore is not there.
var errNoRoom = errors.New("no room for a lock file")

// versions of the specification that are spoken.
func versions() version.PluginInfo {
	return version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// Main is the plugin: it does what the environment and standard input ask for and ends the process with status 1
// when that failed. release is the build's version.
func Main(release string) {
	p := &plugin{stdout: os.Stdout, stderr: os.Stderr, delegateWait: delegateWait, wait: lockWait}
	skel.PluginMainFuncs(p.funcs(), versions(), "CNI plugin ebpf-cni "+release)
}

type plugin struct {
	stdout, stderr io.Writer
	wait           time.Duration // for locks
	delegateWait   time.Duration // for another ipam plugin
	// step is for tests, see endpoint.Releaser; ADD's last one is "result".
	step func(name string) error
}

func (p *plugin) funcs() skel.CNIFuncs {
	return skel.CNIFuncs{
		Add: p.verb("ADD", (*call).add), Del: p.verb("DEL", (*call).del), Check: p.verb("CHECK", (*call).check),
		GC: p.verb("GC", (*call).gc), Status: p.verb("STATUS", (*call).status),
	}
}

// verb is an operation as the library calls it.
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

// call is one call of the plugin: its parameters, checked, and its tools.
type call struct {
	*plugin
	*conf
	verb string
	id   endpoint.ID
	args *skel.CmdArgs
	log  *slog.Logger
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
	for _, name := range parsed.unknown {
		c.log.Warn("unknown field of the network configuration ignored", "field", name)
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
	c.log.Error("operation refused or failed", "error", err)
	if coded, ok := errors.AsType[*types.Error](err); ok {
		return types.NewError(coded.Code, withoutDetails(err, coded), coded.Details)
	}
	if errors.Is(err, bpffs.ErrLocked) || errors.Is(err, endpoint.ErrNoDataplane) {
		return types.NewError(types.ErrTryAgainLater, err.Error(), "")
	}
	return types.NewError(types.ErrInternal, err.Error(), "")
}

// withoutDetails is the whole chain's text; the innermost error's details have a field of their own.
func withoutDetails(err error, coded *types.Error) string {
	return strings.Replace(err.Error(), coded.Error(), coded.Msg, 1)
}

// openLog logs to the configured file, or to the standard error output. A pod is not refused because its start can't
// be logged.
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

// shared runs fn while the node's lock is held for work on one endpoint, and the endpoint's own.
func (c *call) shared(fn func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.wait)
	defer cancel()
	node, err := bpffs.Shared(ctx, c.stateDir, c.verb)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no state directory: %w", endpoint.ErrNoDataplane, err)
	}
	if err != nil {
		return lockError(err)
	}
	defer node.Release()
	own, err := endpoint.Acquire(ctx, c.stateDir, c.id)
	if err != nil {
		return lockError(err)
	}
	defer own.Release()
	return fn(ctx)
}

func lockError(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", errNoRoom, err)
	}
	return err
}

// releaser takes endpoints away; their addresses rest as the configuration says.
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
