package modes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Ready is an error unless the machine has all that building a mode takes. It builds nothing.
func Ready(mode string) error { return ready("/proc/sys/net", mode) }

func ready(sysctls, mode string) error {
	for _, program := range programs(mode) {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("mode %s needs %s: %w; install it (make bench does), or choose --modes without it", mode, program, err)
		}
	}
	if err := loaded(sysctls, mode); err != nil {
		return fmt.Errorf("mode %s: %w", mode, err)
	}
	for _, ours := range binaries(mode) {
		if _, err := new(lab.Lab).Binary(ours); err != nil {
			return fmt.Errorf("mode %s: %w", mode, err)
		}
	}
	return nil
}

// programs are those of the machine that a mode runs. What it builds upstream's plugins with is one.
func programs(mode string) []string {
	switch mode {
	case EBPFKubeProxy:
		return []string{"iptables-restore", "go"}
	case IPTables, IPTablesVXLAN, PTP:
		return []string{"iptables-restore", "iptables", "go"}
	case NFTables:
		return []string{"nft", "go"}
	}
	return nil
}

// binaries are the project's own that a mode is built with. The classical ones keep upstream's plugins beside ours.
func binaries(mode string) []string {
	switch {
	case mode == Direct:
		return nil
	case ours(mode):
		return []string{"ebpf-cni", "ebpf-agent"}
	}
	return []string{"ebpf-cni"}
}

// ours says that a mode has this project's agents.
func ours(mode string) bool { return mode == EBPF || mode == EBPFKubeProxy }

// loaded asks for the kernel modules that no namespace can load for itself. They change how the machine's own bridges and
// connections are treated, so they are its owner's to load.
func loaded(sysctls, mode string) error {
	if mode == Direct || mode == EBPF {
		return nil
	}
	modules := [][2]string{{"nf_conntrack", "netfilter/nf_conntrack_max"}}
	if mode != PTP && mode != EBPFKubeProxy {
		modules = append(modules, [2]string{"br_netfilter", "bridge/bridge-nf-call-iptables"})
	}
	for _, m := range modules {
		if _, err := os.Stat(filepath.Join(sysctls, m[1])); err != nil {
			return fmt.Errorf("the kernel module %s is not loaded: modprobe %s, or choose --modes without it: %w", m[0], m[0], err)
		}
	}
	return nil
}
