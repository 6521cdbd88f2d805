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

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// ErrKubeProxy is returned (wrapped) while a kube-proxy runs on this node.
var ErrKubeProxy = errors.New("a kube-proxy runs on this node, which would make anew what is removed: end it first")

// CleanupKubeProxy removes what a kube-proxy of any mode has left on this node, and writes a line about each thing to out. An agent may run
// meanwhile. What can't be removed does not keep the rest from being removed.
func CleanupKubeProxy(ctx context.Context, out io.Writer) error {
	if err := noKubeProxy(ctx, "/proc"); err != nil {
		return err
	}
	tell := func(what string) { _, _ = fmt.Fprintln(out, "removed", what) }
	err := netfilter.RemoveKubeProxy(tell)
	if !errors.Is(err, fs.ErrPermission) { // all of it takes the same right
		err = errors.Join(err, removeKubeProxyLink(tell), netfilter.RemoveKubeProxySets(tell), virtualServers("/proc"))
	}
	if err != nil {
		return fmt.Errorf("remove what kube-proxy has left: %w", err)
	}
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
