#!/bin/sh
# Packs Debian's packages, with all that they depend on, as the layer that images stand on:
#
#   base.sh TARGET.tar PACKAGE...
#
# Nothing is installed, and no package's script runs: what those would have made and a pod needs is made here.
set -eu
target=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

# By an empty status apt gets what this machine has as well.
get() {
	apt-get -q -y --no-install-recommends -o Debug::NoLocking=1 -o APT::Sandbox::User=root \
		-o Dir::State::status="$work/status" -o Dir::Cache="$work" --download-only install "$@"
}
mkdir -p "$work/archives/partial"
: >"$work/status"
get "$@" || { apt-get -q update && get "$@"; }

for dir in bin sbin lib lib64; do
	mkdir -p "$root/usr/$dir"
	ln -s "usr/$dir" "$root/$dir"
done
for package in "$work"/archives/*.deb; do
	dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root"
done
rm -rf "$root/usr/share/doc" "$root/usr/share/man" "$root/usr/share/locale" "$root/usr/share/info"

ln -sf dash "$root/bin/sh"
ln -sf nc.openbsd "$root/bin/nc"
mkdir "$root/busybox"
for applet in $(chroot "$root" /bin/busybox --list); do
	ln -s ../bin/busybox "$root/busybox/$applet"
done
mkdir -p "$root/uploads"
chmod 1777 "$root/tmp"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
printf '%s\n' root:x:0:0:root:/root:/bin/sh www-data:x:33:33:www-data:/var/www:/bin/false >"$root/etc/passwd"
printf '%s\n' root:x:0: www-data:x:33: >"$root/etc/group"

tar -c -C "$root" . >"$target.new"
mv "$target.new" "$target"
