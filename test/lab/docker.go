package lab

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// dockerTimeout is how long a dockerd may take until it answers.
const dockerTimeout = 30 * time.Second

// image is what containers are made from.
const image = "lab"

// Docker is a real dockerd of a node's: in the node's network namespace and cgroup, with mounts and files of its own, so that it
// touches nothing of one that the machine has. It and its containers end with the lab.
type Docker struct {
	node    *Node
	dir     string
	program *Program
}

// ownMounts has the rest of its arguments run where /run is empty but for the directory that is the first, and where the cgroup that
// they are in is the root of all.
const ownMounts = `set -e
dir=$1
shift
mkdir "$dir/run"
mount -n -t tmpfs tmpfs "$dir/run"
mkdir -p "$dir/run${dir#/run}"
mount -n --bind "$dir" "$dir/run${dir#/run}"
mount -n --move "$dir/run" /run
mount -n -t cgroup2 cgroup2 /sys/fs/cgroup
exec "$@"
`

// StartDocker starts the node's dockerd with options, such as --bip, and waits until it can run containers.
func (n *Node) StartDocker(ctx context.Context, options ...string) (*Docker, error) {
	d := &Docker{node: n, dir: filepath.Join(n.Dir, "docker")}
	err := d.prepare()
	if err == nil {
		err = d.start(ctx, []string{"unshare", "--mount", "--cgroup", "sh", "-c", ownMounts, "sh", d.dir}, options)
	}
	if err != nil {
		return nil, fmt.Errorf("start dockerd on %s: %w", n.Name, err)
	}
	return d, d.makeImage(ctx)
}

// DockerOptions are those of a dockerd whose bridge has the node's subnet, as a unit of Docker's gets them.
func (n *Node) DockerOptions(ctx context.Context) ([]string, error) {
	file := filepath.Join(n.Dir, "docker_opts.env")
	if _, err := n.Ebpfctl(ctx, "docker-opts", "--combined", "-f", n.SubnetFile(), "-d", file); err != nil {
		return nil, err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read Docker's options: %w", err)
	}
	_, value, _ := strings.Cut(strings.TrimSpace(string(content)), "=")
	return strings.Fields(strings.Trim(value, `"`)), nil
}

func (d *Docker) prepare() error {
	if d.node.cgroup == "" {
		return errors.New("cgroup2 is not mounted on this machine, which it needs to leave others' cgroups alone")
	}
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(d.config(), []byte("{}\n"), 0o600)
}

// start starts dockerd by a command that has it be in namespaces of its own, and waits until it answers.
func (d *Docker) start(ctx context.Context, inside, options []string) error {
	dockerd, err := priv.Program("dockerd")
	if err != nil {
		return err
	}
	args, err := d.environ()
	if err != nil {
		return err
	}
	args = append(append(args, inside...),
		dockerd, "--config-file", d.config(), "--data-root", d.path("data"), "--exec-root", d.path("exec"), "--pidfile", d.path("pid"),
		"--host", d.host(), "--exec-opt", "native.cgroupdriver=cgroupfs")
	if d.program, err = d.node.StartProgram("dockerd", "env", append(args, options...)...); err != nil {
		return err
	}
	if err := d.answers(ctx); err != nil {
		return fmt.Errorf("%w\n%s", errors.Join(err, d.program.Stop()), tail(d.program.log, 20))
	}
	return nil
}

// Restart ends dockerd, and starts it with other options. If it had --live-restore, its containers run on.
func (d *Docker) Restart(ctx context.Context, options ...string) error {
	if err := d.restart(ctx, options); err != nil {
		return fmt.Errorf("restart dockerd on %s: %w", d.node.Name, err)
	}
	return nil
}

func (d *Docker) restart(ctx context.Context, options []string) error {
	inside, held := []string{"nsenter"}, []*os.File{}
	defer func() {
		for _, ns := range held {
			_ = ns.Close()
		}
	}()
	for flag, kind := range map[string]string{"--mount": "mnt", "--cgroup": "cgroup"} {
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", d.program.cmd.Process.Pid, kind))
		if err != nil {
			return err
		}
		held = append(held, ns)
		inside = append(inside, fmt.Sprintf("%s=/proc/%d/fd/%d", flag, os.Getpid(), ns.Fd()))
	}
	if err := d.program.Stop(); err != nil {
		return err
	}
	return d.start(ctx, inside, options)
}

// config is a file, so that the machine's own is not read.
func (d *Docker) config() string { return d.path("daemon.json") }

func (d *Docker) path(name string) string { return filepath.Join(d.dir, name) }

func (d *Docker) host() string { return "unix://" + d.path("socket") }

// environ has containerd, runc and the rest be found.
func (d *Docker) environ() ([]string, error) {
	dirs, err := priv.Unpacked()
	path := strings.Join(append([]string{os.Getenv("PATH")}, dirs...), ":")
	return []string{"PATH=" + path, "HOME=" + d.dir, "DOCKER_HOST=" + d.host()}, err
}

// answers waits until dockerd does.
func (d *Docker) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(dockerTimeout))
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.path("socket"))
	}}}
	for {
		ask, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/_ping", nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(ask)
		if err == nil {
			answer.Body.Close()
			return nil
		}
		select {
		case <-d.program.Ended():
			return errors.New("it has ended")
		case <-ctx.Done():
			return fmt.Errorf("wait for an answer: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// makeImage makes the only image, since none can be pulled: busybox, and a name for each of its programs that people may want.
func (d *Docker) makeImage(ctx context.Context) error {
	path, err := priv.Program("busybox")
	if err != nil {
		return err
	}
	busybox, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("make an image: %w", err)
	}
	var content bytes.Buffer
	archive := tar.NewWriter(&content)
	err = archive.WriteHeader(&tar.Header{Name: "bin/busybox", Mode: 0o755, Size: int64(len(busybox))})
	if err == nil {
		_, err = archive.Write(busybox)
	}
	for _, name := range []string{"sh", "ls", "ps", "ip", "ping", "wget", "nc", "sleep"} {
		if err == nil {
			err = archive.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox"})
		}
	}
	if err == nil {
		err = archive.Close()
	}
	if err == nil {
		_, err = d.docker(ctx, &content, "import", "-", image)
	}
	return err
}

// Run starts a container with options, such as --publish, whose network is the namespace returned.
func (d *Docker) Run(ctx context.Context, name string, options ...string) (*Namespace, error) {
	args := append([]string{"run", "--detach", "--stop-signal", "KILL", "--name", name}, options...)
	if _, err := d.Command(ctx, append(args, image, "sleep", "1000000")...); err != nil {
		return nil, err
	}
	out, err := d.Command(ctx, "inspect", "--format", "{{.State.Pid}} {{.NetworkSettings.IPAddress}}", name)
	if err != nil {
		return nil, err
	}
	var pid int
	var text string
	if _, err := fmt.Sscan(string(out), &pid, &text); err != nil {
		return nil, fmt.Errorf("read docker inspect's answer %q: %w", out, err)
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return nil, fmt.Errorf("read the address of container %s: %w", name, err)
	}
	return d.node.lab.adopt(fmt.Sprintf("n%d-%s", d.node.Number, name), pid, addr)
}

// Remove ends a container that Run has started.
func (d *Docker) Remove(ctx context.Context, name string, container *Namespace) error {
	_, err := d.Command(ctx, "rm", "--force", name)
	return errors.Join(err, d.node.lab.dropNamespace(container))
}

// Command runs docker with arguments, and returns what it wrote to stdout.
func (d *Docker) Command(ctx context.Context, args ...string) ([]byte, error) {
	return d.docker(ctx, &bytes.Buffer{}, args...)
}

func (d *Docker) docker(ctx context.Context, stdin *bytes.Buffer, args ...string) ([]byte, error) {
	path, err := priv.Program("docker")
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	if cmd.Env, err = d.environ(); err != nil {
		return nil, err
	}
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("docker %s on %s: %w: %s", strings.Join(args, " "), d.node.Name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), nil
}

// Client is the command by which a person runs docker against it.
func (d *Docker) Client() ([]string, error) {
	path, err := priv.Program("docker")
	return []string{path, "-H", d.host()}, err
}
