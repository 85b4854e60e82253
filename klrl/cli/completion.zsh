# Completion of klrl's words in zsh: eval "$(klrl completion zsh)"
_klrl() {
    local -a found whole open
    found=("${(@f)$("${words[1]}" completion query -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    open=(${(M)found:#*[=.]})
    whole=(${found:#*[=.]})
    compadd -S '' -a open
    compadd -a whole
    [[ -n $found ]] || { compset -P '*='; _files }
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _klrl klrl
