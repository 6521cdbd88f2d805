package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// initName is the name under which this executable is process 1 of a machine.
const initName = "ebpf-cni-cluster-init"

// initConfig is what process 1 is told.
type initConfig struct {
	Name       string
	Addrs      []netip.Addr
	ClusterDir string
	Dir        string
	NoBPFFS    bool
}

// The descriptors that process 1 is born with.
const (
	configFD   = 3
	lifelineFD = 4
)

// configEnv carries the configuration over process 1's exec of itself.
const configEnv = "EBPF_CNI_CLUSTER_INIT"

// Init has to be the first call of every program that makes clusters: the program is also process 1 of their machines.
// It returns at once when this is not one.
func Init() {
	if len(os.Args) == 0 || os.Args[0] != initName {
		return
	}
	err := run()
	fmt.Fprintln(os.Stderr, "process 1:", err)
	os.Exit(1)
}

func run() error {
	if raw := os.Getenv(configEnv); raw != "" {
		var config initConfig
		if err := json.Unmarshal([]byte(raw), &config); err != nil {
			return err
		}
		return serve(config)
	}
	// The configuration comes once this process is in its cgroups: they become the roots that the machine sees.
	raw, err := io.ReadAll(os.NewFile(configFD, "config"))
	if err != nil {
		return err
	}
	if len(raw) == 0 {
		return errors.New("the one who started this machine has given up")
	}
	// One thread takes the namespace; with exec it becomes the whole process.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare cgroups: %w", err)
	}
	return syscall.Exec("/proc/self/exe", []string{initName}, append(os.Environ(), configEnv+"="+string(raw)))
}

// serve makes the machine and works for it until it ends.
func serve(config initConfig) error {
	if err := os.Unsetenv(configEnv); err != nil {
		return err
	}
	if err := furnish(config); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(config.Name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	// Where it is on the real machine, it is on in every network made there.
	for _, addr := range config.Addrs {
		if err := os.WriteFile("/proc/sys/"+networks[FamilyOf(addr)].forwarding, []byte("0"), 0); err != nil {
			return err
		}
	}
	listener, err := net.Listen("unix", filepath.Join(config.Dir, socketFile))
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	go followLifeline()
	s := newSupervisor()
	go s.reap()
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		go s.answer(conn)
	}
}

// followLifeline ends the machine when the one who made it has ended. Without a lifeline the descriptor is not there.
func followLifeline() {
	var stat unix.Stat_t
	if unix.Fstat(lifelineFD, &stat) != nil || stat.Mode&unix.S_IFMT != unix.S_IFIFO {
		return
	}
	unix.CloseOnExec(lifelineFD)
	_, _ = os.NewFile(lifelineFD, "lifeline").Read(make([]byte, 1))
	os.Exit(0)
}
