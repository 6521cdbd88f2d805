package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// ErrKubeProxy is returned (wrapped) while a kube-proxy runs on this node.
var ErrKubeProxy = errors.New("a kube-proxy runs on this node, which would make anew what is removed: end it first")

// ErrNeeded is returned (wrapped) while kube-proxy's rules have work that nobody else does.
var ErrNeeded = errors.New("kube-proxy's rules are still needed here (--force removes them all the same)")

// CleanupKubeProxy removes what a kube-proxy of any mode has left on this node, and writes a line about each thing to out. An agent may run
// meanwhile, and has to where the rules translate and it leaves Services to them: it serves before they go, else nothing is removed unless
// by force. What can't be removed does not keep the rest from being removed.
func CleanupKubeProxy(ctx context.Context, d Directories, force bool, out io.Writer) error {
	if err := noKubeProxy(ctx, "/proc"); err != nil {
		return err
	}
	lock, err := relieveKubeProxy(ctx, d, out)
	defer lock.Release()
	switch {
	case errors.Is(err, ErrNeeded) && force && !errors.Is(ctx.Err(), context.Canceled):
		_, _ = fmt.Fprintln(out, "--force:", err)
	case err != nil:
		return err
	}
	tell := func(what string) { _, _ = fmt.Fprintln(out, "removed", what) }
	err = netfilter.RemoveKubeProxy(tell)
	if !errors.Is(err, fs.ErrPermission) { // all of it takes the same right
		err = errors.Join(err, removeKubeProxyLink(tell), netfilter.RemoveKubeProxySets(tell), virtualServers("/proc"))
	}
	if err != nil {
		return fmt.Errorf("remove what kube-proxy has left: %w", err)
	}
	return nil
}

const (
	// kubeProxyLock is the file in the state directory that is locked while kube-proxy's rules are removed.
	kubeProxyLock = "kube-proxy.lock"
	// relieveWait is how long the agent may take to serve Services: it looks for the lock every inspectInterval.
	relieveWait = 15 * time.Second
	// relievePoll is how often the programs' configuration is asked whether it does.
	relievePoll = 100 * time.Millisecond
)

// kubeProxyGoes says that the rules of a kube-proxy are being removed: they count as gone, so that somebody serves Services when they are.
func kubeProxyGoes(state string) (bool, error) {
	return bpffs.Held(filepath.Join(state, kubeProxyLock))
}

// relieveKubeProxy has somebody else do what kube-proxy's rules do, as long as the lock is held that it returns. The kernel releases that
// with the process: what is left of the rules then counts again.
func relieveKubeProxy(ctx context.Context, d Directories, out io.Writer) (*bpffs.Lock, error) {
	var rules netfilter.KubeProxy
	defer rules.Close()
	if stand, err := rules.Look(time.Now()); errors.Is(err, fs.ErrPermission) || err == nil && stand == (netfilter.Standing{}) {
		return nil, nil // there is nothing to relieve, or whoever removes rules says what that takes
	}
	ctx, cancel := context.WithTimeout(ctx, relieveWait)
	defer cancel()
	lock, err := bpffs.File(ctx, filepath.Join(d.State, kubeProxyLock))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNeeded, err)
	}
	if err != nil {
		return nil, fmt.Errorf("let the agent know: %w", err)
	}
	if err := awaitServing(ctx, d.BPFFS); err != nil {
		return lock, fmt.Errorf("%w: nobody would serve Services: start the agent with --services auto or on: %w", ErrNeeded, err)
	}
	return lock, keepConnections(out)
}

// awaitServing waits until the programs serve Services of both families here.
func awaitServing(ctx context.Context, dir bpffs.Dir) error {
	for {
		err := checkServing(dir)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(relievePoll):
		}
	}
}

func checkServing(dir bpffs.Dir) error {
	m, err := config.Open(dir.Map(config.Name))
	if err != nil {
		return fmt.Errorf("no agent has loaded the programs: %w", err)
	}
	defer m.Close()
	is, err := m.Get(config.Key{})
	switch {
	case err != nil:
		return err
	case is.Flags&config.Services == 0:
		return errors.New("the programs serve no Services")
	case is.Flags&(config.YieldsIPv4|config.YieldsIPv6) != 0:
		return errors.New("the programs leave Services to kube-proxy's rules: no agent runs, or it has --kube-proxy=on")
	}
	return knowServices(dir)
}

// knowServices says whether the programs know of any Service: for host ports alone they do not, nor before an agent has read them.
func knowServices(dir bpffs.Dir) error {
	names, err := typed.Open[services.SetKey, services.ServiceName](dir.Map(services.NamesName))
	if err != nil {
		return fmt.Errorf("no agent has loaded the programs: %w", err)
	}
	defer names.Close()
	for _, err := range names.All() {
		return err
	}
	return errors.New("the programs know of no Service yet")
}

// keepConnections has the connections go on that the rules have translated. The agent has seen to that, unless it has just started.
func keepConnections(out io.Writer) error {
	var bridge netfilter.Bridge
	defer bridge.Close()
	if bridge.Stands() {
		return nil
	}
	if _, err := bridge.Ensure(time.Now()); err != nil {
		return fmt.Errorf("%w: connections that they have translated would end: %w", ErrNeeded, err)
	}
	_, _ = fmt.Fprintln(out, "made nftables table inet", netfilter.BridgeName+", by which connections that kube-proxy's rules have translated go on")
	return nil
}

func removeKubeProxyLink(tell func(string)) error {
	host, err := device.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	link, err := host.LinkByName(ipvsName)
	switch {
	case errors.Is(err, device.ErrNotFound):
		return nil
	case err != nil:
		return err
	case link.Kind != "dummy":
		return fmt.Errorf("remove link %s: it is no dummy but a %s, so not kube-proxy's", ipvsName, link.Kind)
	}
	if err := host.DeleteLink(link.Index); err != nil {
		return err
	}
	tell("link " + ipvsName)
	return nil
}

// virtualServers says which the kernel has, kube-proxy's or not: IPVS tells nobody whose they are.
func virtualServers(proc string) error {
	content, err := os.ReadFile(filepath.Join(proc, "thread-self/net/ip_vs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read virtual servers of IPVS: %w", err)
	}
	n := 0
	for line := range strings.Lines(string(content)) {
		if protocol, _, _ := strings.Cut(line, " "); slices.Contains([]string{"TCP", "UDP", "SCTP"}, protocol) {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("%d virtual servers of IPVS are left, since they may be somebody else's: if they are not, `ipvsadm --clear` removes them, and so does a reboot", n)
	}
	return nil
}

// noKubeProxy looks for a kube-proxy as a process, and for one that answers where it does by default: in a container it is no process that
// is seen, in k3s it has no process of its own.
func noKubeProxy(ctx context.Context, proc string) error {
	own, err := os.Readlink(filepath.Join(proc, "thread-self/ns/net"))
	if err != nil {
		return fmt.Errorf("look for a kube-proxy: %w", err)
	}
	processes, err := os.ReadDir(proc)
	if err != nil {
		return fmt.Errorf("look for a kube-proxy: %w", err)
	}
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		comm, _ := os.ReadFile(filepath.Join(proc, p.Name(), "comm")) // none: it has ended
		if string(bytes.TrimSpace(comm)) != "kube-proxy" {
			continue
		}
		// One that can't be asked may be in this namespace.
		if netns, err := os.Readlink(filepath.Join(proc, p.Name(), "ns/net")); err != nil && !errors.Is(err, fs.ErrNotExist) || netns == own {
			return fmt.Errorf("%w (process %s)", ErrKubeProxy, p.Name())
		}
	}
	if mode := modeOfKubeProxy(ctx); mode != "" {
		return fmt.Errorf("%w (http://%s/proxyMode says %s)", ErrKubeProxy, modeAddress, mode)
	}
	return nil
}

// modeOfKubeProxy is what a kube-proxy says; empty: none answers. We answer there ourselves, with another mode.
func modeOfKubeProxy(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+modeAddress+"/proxyMode", nil)
	if err != nil {
		return ""
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	const longest = 32
	body, _ := io.ReadAll(io.LimitReader(response.Body, longest))
	if mode := string(bytes.TrimSpace(body)); slices.Contains([]string{"iptables", "ipvs", "nftables"}, mode) {
		return mode
	}
	return ""
}
